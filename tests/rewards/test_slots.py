"""How many calls run at once. Nothing here waits for a clock but the slots themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from slipstream.rewards import slots
from slipstream.rewards.runner import DeadlineRunner
from slipstream.rewards.slots import COMPUTING, MOST, Slots, ThreadClock


async def most_at_once(several: Slots, calls: int, *, waits: bool = False, until: int = 0) -> int:
    """How many of `calls` are inside together: `until` have come, and nobody comes any more."""
    inside = most = 0
    reached, over = anyio.Event(), anyio.Event()

    async def one() -> None:
        nonlocal inside, most
        async with several.one(waits=waits):
            inside += 1
            most = max(most, inside)
            if inside == until:
                reached.set()
            await over.wait()
            inside -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(calls):
            tasks.start_soon(one)
        if until:
            await reached.wait()
        # Many looks at what runs.
        await anyio.sleep(0.1)
        over.set()
    return most


def waiting() -> dict[int, float | None]:
    return {0: 1.0}


def computing() -> dict[int, float | None]:
    return {0: time.monotonic()}


@pytest.mark.parametrize(
    ("number", "computed", "calls", "most"),
    [
        (None, computing, 20, COMPUTING),
        (None, lambda: {0: None}, 20, COMPUTING),
        (3, waiting, 20, 3),
        (1, waiting, 20, 1),
        (30, computing, 20, 20),
    ],
)
def test_as_many_as_may_compute(
    number: int | None, computed: Callable[[], dict[int, float | None]], calls: int, most: int
) -> None:

    async def run() -> int:
        return await most_at_once(Slots(number, computed), calls, until=most)

    assert anyio.run(run) == most


@pytest.mark.parametrize("most", [MOST, 50])
def test_many_more_where_they_wait(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MOST", most)

    async def run() -> int:
        return await most_at_once(Slots(None, waiting), 2 * most, until=most)

    assert anyio.run(run) == most


def test_those_that_are_known_to_wait_are_not_looked_at() -> None:
    def never() -> dict[int, float | None]:
        raise AssertionError

    async def run() -> int:
        return await most_at_once(Slots(None, never), MOST, waits=True, until=MOST)

    assert anyio.run(run) == MOST


def test_serves_one_event_loop_after_the_other() -> None:
    one = Slots(1, waiting)
    for _ in range(2):
        assert anyio.run(most_at_once, one, 3) == 1


def test_all_calls_that_wait_run_together() -> None:
    """Each ends only when all have begun."""
    count = 64
    together = threading.Barrier(count)

    async def run() -> list[str | None]:
        runner = DeadlineRunner(timeout_s=60)
        failures: list[str | None] = []

        async def one() -> None:
            outcome = await runner.run(together.wait, name="together", asynchronous=False)
            failures.append(outcome.failure)

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(one)
        return failures

    assert anyio.run(run) == [None] * count


def test_calls_that_compute_take_turns() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def busy() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        with lock:
            inside -= 1

    async def run() -> None:
        runner = DeadlineRunner(timeout_s=60)
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(partial(runner.run, busy, name="busy", asynchronous=False))

    anyio.run(run)
    # A machine that stands still for ten milliseconds looks as if they waited.
    assert COMPUTING <= most < 50


def test_a_threads_clock_is_read_by_others() -> None:
    clock, begun, over = ThreadClock(), threading.Event(), threading.Event()
    assert clock.seconds() is None

    def work() -> None:
        clock.begin()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        begun.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    first = clock.seconds()
    assert first is not None
    assert first >= 0.05
    time.sleep(0.05)
    second = clock.seconds()
    assert second is not None
    assert second - first < 0.04
    over.set()
    thread.join()
