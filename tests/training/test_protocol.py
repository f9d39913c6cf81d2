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


def test_result_refuses_to_wait_and_await_delivers() -> None:
    compute = ComputeThread()
    gate = threading.Event()

    async def main() -> tuple[int, int, list[str]]:
        order: list[str] = []
        future = compute.submit(lambda: gate.wait(10) and 3)
        with pytest.raises(RuntimeError, match="not done"):
            future.result()

        async def other() -> None:
            # Runs while the work is under way: the loop is not blocked.
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


def test_a_cancelled_wait_leaves_the_work_alone() -> None:
    compute = ComputeThread()
    gate = threading.Event()
    futures: list[TrainFuture[bool]] = []

    async def main() -> None:
        futures.append(compute.submit(lambda: gate.wait(10)))
        with anyio.move_on_after(0.01) as scope:
            await futures[0]
        assert scope.cancelled_caught

    anyio.run(main)
    # The loop that waited is closed by now; finishing must not disturb the thread.
    gate.set()
    assert futures[0].wait(10)
    assert compute.run(lambda: 5) == 5
    compute.close()


def test_work_runs_in_order_on_one_other_thread() -> None:
    compute = ComputeThread("unit")
    seen: list[tuple[int, str]] = []

    def work(i: int) -> None:
        seen.append((i, threading.current_thread().name))

    for i in range(5):
        compute.submit(lambda i=i: work(i))  # type: ignore[misc]
    # Work may itself ask for work: it is on the thread already.
    assert compute.run(lambda: compute.run(lambda: 1) + 1) == 2
    compute.close()

    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert len({name for _, name in seen}) == 1
    assert seen[0][1].startswith("unit")
