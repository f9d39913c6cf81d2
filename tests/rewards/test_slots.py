"""`Slots` limits concurrent calls depending on whether they use the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from slipstream.rewards import slots
from slipstream.rewards.runner import DeadlineRunner
from slipstream.rewards.slots import COMPUTING, MAX_AT_ONCE, Slots, ThreadClock


async def most_at_once(several: Slots, calls: int, *, waits: bool = False, until: int = 0) -> int:
    """Return how many of `calls` run at once, after `until` have started and no more start."""
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
        # Long enough for many measurements of the running calls.
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
def test_computing_calls_are_limited(
    number: int | None, computed: Callable[[], dict[int, float | None]], calls: int, most: int
) -> None:

    async def run() -> int:
        return await most_at_once(Slots(number, computed), calls, until=most)

    assert anyio.run(run) == most


@pytest.mark.parametrize("most", [MAX_AT_ONCE, 50])
def test_waiting_calls_may_reach_the_maximum(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_AT_ONCE", most)

    async def run() -> int:
        return await most_at_once(Slots(None, waiting), 2 * most, until=most)

    assert anyio.run(run) == most


def test_calls_known_to_wait_are_not_measured() -> None:
    def never() -> dict[int, float | None]:
        raise AssertionError

    async def run() -> int:
        return await most_at_once(Slots(None, never), MAX_AT_ONCE, waits=True, until=MAX_AT_ONCE)

    assert anyio.run(run) == MAX_AT_ONCE


def test_slots_work_in_successive_event_loops() -> None:
    one = Slots(1, waiting)
    for _ in range(2):
        assert anyio.run(most_at_once, one, 3) == 1


def test_all_waiting_calls_run_at_once() -> None:
    """Each call ends only when all have started."""
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


def test_computing_threads_are_limited() -> None:
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
    # If the machine stalls for 10 ms, computing calls look like waiting ones.
    assert COMPUTING <= most < 50


def test_a_thread_clock_can_be_read_from_another_thread() -> None:
    clock, started, over = ThreadClock(), threading.Event(), threading.Event()
    assert clock.seconds() is None

    def work() -> None:
        clock.begin()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        started.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    first = clock.seconds()
    assert first is not None
    assert first >= 0.05
    time.sleep(0.05)
    second = clock.seconds()
    assert second is not None
    assert second - first < 0.04
    over.set()
    thread.join()
