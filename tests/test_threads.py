from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import getcontext

import anyio
import anyio.lowlevel
import pytest

from slipstream.threads import DaemonThreads, arrival


def test_arrival_waits_for_result_error_or_cancellation() -> None:
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


def test_arrival_ends_at_its_timeout_and_leaves_the_work_alone() -> None:
    work: Future[int] = Future()

    async def main() -> None:
        await arrival(work, 0.001)
        assert not work.done()
        work.set_result(3)
        await anyio.lowlevel.checkpoint()

    anyio.run(main)
    assert work.result() == 3


def test_cancelled_arrival_does_not_cancel_the_work(caplog: pytest.LogCaptureFixture) -> None:
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
        # The waiting event loop has ended; that it cannot be woken must not be logged as an error.
        release.set()
        assert queued.result(60) == "still done"
        assert running.result(60)
    assert caplog.records == []


def test_finished_work_does_not_wait_for_the_event_loop() -> None:
    went_on = threading.Event()

    async def main() -> None:
        work: Future[None] = Future()

        def finish() -> None:
            work.set_result(None)
            went_on.set()

        thread = threading.Thread(target=finish)

        async def start() -> None:
            thread.start()
            # The event loop is busy until the thread has continued.
            assert went_on.wait(60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(arrival, work)
            tasks.start_soon(start)

    anyio.run(main)


def _ident(threads: DaemonThreads) -> int:
    return threads.submit(threading.get_ident).result(60)


def _settle(threads: DaemonThreads, idle: int) -> None:
    for _ in range(10_000):
        if len(threads._idle) == idle:
            return
        threading.Event().wait(0.001)
    pytest.fail(f"{len(threads._idle)} threads are idle, not {idle}")


def test_exceptions_of_work_are_stored_in_its_future() -> None:
    threads = DaemonThreads("test-raises")
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt()):

        def raising(error: BaseException = error) -> None:
            raise error

        assert threads.submit(raising).exception(60) is error
    assert threads.submit(lambda: 3).result(60) == 3


def test_idle_thread_is_reused() -> None:
    threads = DaemonThreads("test-again")
    first = _ident(threads)
    for _ in range(5):
        _settle(threads, 1)
        assert _ident(threads) == first


def test_work_runs_in_a_fresh_context() -> None:
    threads = DaemonThreads("test-context")

    def sets_precision() -> int:
        before, getcontext().prec = getcontext().prec, 3
        return before

    first = threads.submit(sets_precision).result(60)
    _settle(threads, 1)
    assert threads.submit(sets_precision).result(60) == first != 3


def test_work_that_hangs_does_not_block_other_work() -> None:
    threads, release = DaemonThreads("test-hangs"), threading.Event()
    hung = threads.submit(lambda: release.wait(60))
    idents = {_ident(threads) for _ in range(3)}
    named = [t for t in threading.enumerate() if t.name == "test-hangs"]
    assert all(t.daemon for t in named)
    assert len(named) > len(idents)
    assert not hung.done()
    release.set()
    assert hung.result(60)
    _settle(threads, len(named))


def test_threads_end_after_the_idle_timeout() -> None:
    threads = DaemonThreads("test-idle", idle_s=0.01)
    _ident(threads)
    for thread in [t for t in threading.enumerate() if t.name == "test-idle"]:
        thread.join(60)
        assert not thread.is_alive()
    assert threads._idle == []
    # New work starts a new thread.
    assert _ident(threads)


def test_thread_with_assigned_work_does_not_end() -> None:
    threads, done = DaemonThreads("test-race", idle_s=0.01), threading.Event()
    inbox = None
    while inbox is None:
        _ident(threads)
        with threads._lock:
            inbox = threads._idle.pop() if threads._idle else None
    threading.Event().wait(0.05)
    inbox.put(done.set)
    assert done.wait(60)
