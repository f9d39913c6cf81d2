from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from slipstream.threads import DaemonThreads, arrival


def test_arrival_waits_for_a_result_a_failure_or_a_cancellation() -> None:
    done: Future[int] = Future()
    failed: Future[int] = Future()
    cancelled: Future[int] = Future()
    reached: list[str] = []

    async def wait(name: str, work: Future[int]) -> None:
        await arrival(work)
        reached.append(name)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "done", done)
            tasks.start_soon(wait, "failed", failed)
            tasks.start_soon(wait, "cancelled", cancelled)
            await anyio.wait_all_tasks_blocked()
            assert reached == []
            await anyio.to_thread.run_sync(cancelled.cancel)
            await anyio.to_thread.run_sync(failed.set_exception, ValueError("no"))
            await anyio.wait_all_tasks_blocked()
            assert sorted(reached) == ["cancelled", "failed"]
            done.set_result(3)
        await arrival(done)

    anyio.run(main)
    assert sorted(reached) == ["cancelled", "done", "failed"]
    assert done.result() == 3


def test_being_cancelled_leaves_the_work_alone(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(release.wait, 60)
        queued = pool.submit(lambda: "still done")

        async def main() -> None:
            with anyio.move_on_after(0.01) as scope:
                await arrival(queued)
            assert scope.cancelled_caught

        anyio.run(main)
        assert not queued.done()
        # The loop that waited has ended: waking it is nobody's failure.
        release.set()
        assert queued.result(60) == "still done"
        assert running.result(60)
    assert caplog.records == []


def test_waking_the_loop_does_not_make_the_thread_wait() -> None:
    went_on = threading.Event()

    async def main() -> None:
        work: Future[None] = Future()

        def finish() -> None:
            work.set_result(None)
            went_on.set()

        thread = threading.Thread(target=finish)

        async def start() -> None:
            thread.start()
            # The event loop is busy until the thread has gone on.
            assert went_on.wait(60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(arrival, work)
            tasks.start_soon(start)

    anyio.run(main)


def _ident(threads: DaemonThreads) -> Any:
    done: Future[int] = Future()
    threads.start(lambda: done.set_result(threading.get_ident()))
    return done.result(60)


def _settle(threads: DaemonThreads, idle: int) -> None:
    for _ in range(10_000):
        if len(threads._idle) == idle:
            return
        threading.Event().wait(0.001)
    pytest.fail(f"{len(threads._idle)} threads are idle, not {idle}")


def test_a_thread_takes_more_work() -> None:
    threads = DaemonThreads("test-again")
    first = _ident(threads)
    for _ in range(5):
        _settle(threads, 1)
        assert _ident(threads) == first


def test_work_that_hangs_holds_up_no_other() -> None:
    threads, release = DaemonThreads("test-hangs"), threading.Event()

    def hang() -> None:
        release.wait(60)

    threads.start(hang)
    idents = {_ident(threads) for _ in range(3)}
    named = [t for t in threading.enumerate() if t.name == "test-hangs"]
    assert all(t.daemon for t in named)
    assert len(idents - {t.ident for t in named}) == 0
    assert len(named) > len(idents)
    release.set()
    _settle(threads, len(named))


def test_idle_threads_end() -> None:
    threads = DaemonThreads("test-idle", idle_s=0.01)
    _ident(threads)
    for thread in [t for t in threading.enumerate() if t.name == "test-idle"]:
        thread.join(60)
        assert not thread.is_alive()
    assert threads._idle == []
    # And another one begins.
    assert _ident(threads)


def test_no_work_is_lost_to_a_thread_that_ends() -> None:
    # It gives up waiting just when it is given work, again and again.
    threads = DaemonThreads("test-race", idle_s=1e-6)
    done = [Future[int]() for _ in range(300)]
    for i, future in enumerate(done):
        threads.start(lambda i=i, future=future: future.set_result(i))  # type: ignore[misc]
        if i % 3 == 0:
            future.result(60)
    assert [future.result(60) for future in done] == list(range(300))
