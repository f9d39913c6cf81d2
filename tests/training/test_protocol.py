"""Training futures and the compute thread."""

from __future__ import annotations

import threading

import anyio
import pytest

from slipstream.training import ComputeThread, ImmediateTrainFuture, TrainFuture


def test_immediate_future_is_done() -> None:
    future = ImmediateTrainFuture(7)
    assert future.done()
    assert future.result() == 7

    async def main() -> int:
        return await future

    assert anyio.run(main) == 7


def test_result_raises_if_not_done_and_await_waits() -> None:
    compute = ComputeThread()
    gate = threading.Event()

    async def main() -> tuple[int, int, list[str]]:
        order: list[str] = []
        future = compute.submit(lambda: gate.wait(10) and 3)
        with pytest.raises(RuntimeError, match="not done"):
            future.result()

        async def other() -> None:
            # Runs while the work is running, so the event loop is not blocked.
            order.append("other")
            gate.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            first = await future
            order.append("first")
        second = await future
        assert future.result() == 3
        return int(first), int(second), order

    assert anyio.run(main) == (3, 3, ["other", "first"])
    compute.close()


def test_failures_are_raised_where_awaited() -> None:
    compute = ComputeThread()

    def fail() -> int:
        raise ValueError("broken")

    async def main() -> None:
        with pytest.raises(ValueError, match="broken"):
            await compute.submit(fail)

    anyio.run(main)
    compute.close()


def test_cancelling_an_await_does_not_stop_the_work() -> None:
    compute = ComputeThread()
    gate = threading.Event()
    futures: list[TrainFuture[bool]] = []

    async def main() -> None:
        futures.append(compute.submit(lambda: gate.wait(10)))
        with anyio.move_on_after(0.01) as scope:
            await futures[0]
        assert scope.cancelled_caught

    anyio.run(main)
    # The event loop that awaited is closed by now; the end of the work must not fail.
    gate.set()
    assert futures[0].wait(10)
    assert compute.run(lambda: 5) == 5
    compute.close()


def test_compute_thread_runs_work_in_order() -> None:
    compute = ComputeThread("unit")
    seen: list[tuple[int, str]] = []

    def work(i: int) -> None:
        seen.append((i, threading.current_thread().name))

    for i in range(5):
        compute.submit(lambda i=i: work(i))  # type: ignore[misc]
    # Work on the thread may call `run` itself.
    assert compute.run(lambda: compute.run(lambda: 1) + 1) == 2
    compute.close()

    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert len({name for _, name in seen}) == 1
    assert seen[0][1].startswith("unit")
