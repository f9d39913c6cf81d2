"""Worker processes end at their limits, and their answers cannot be forged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import Context

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.workers import CALL_TIMEOUT_S, TooMuchWorkError, WorkerPool

WORK = "tests.rewards.worker_functions:work"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(WORK, size=2, cpu_limit_s=0.2)
    yield pool
    pool.close()


def test_results_are_returned_and_the_process_is_reused(pool: WorkerPool) -> None:
    assert pool.call("after sum", 1, 2, 3) == 6
    assert pool.call("after pid") == pool.call("before pid")
    assert pool.killed == 0


@pytest.mark.parametrize("kind", ["loop", "power", "memory", "sleep", "exit", "kill", "long"])
def test_a_response_that_takes_too_much_ends_only_its_worker(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(TooMuchWorkError):
        pool.call(f"after {kind}")
    assert pool.call("after sum", 2, 3) == 5


@pytest.mark.parametrize("kind", ["loop", "exit", "value"])
def test_a_ground_truth_that_cannot_be_computed_is_an_error_of_the_data(
    pool: WorkerPool, kind: str
) -> None:
    with pytest.raises(ValueError, match=r"ground truth|not this"):
        pool.call(f"before {kind}")


@pytest.mark.parametrize("kind", ["value", "recursion", "system exit"])
def test_whatever_a_response_raises_is_too_much_work(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(TooMuchWorkError):
        pool.call(f"after {kind}")
    assert pool.killed == 0


def test_a_missing_library_is_a_reward_error(pool: WorkerPool) -> None:
    with pytest.raises(RewardError, match="install it"):
        pool.call("after reward")
    unprepared = WorkerPool(WORK, prepare="tests.rewards.worker_functions:missing")
    with pytest.raises(RewardError, match="pip install something"):
        unprepared.call("after sum")


def test_prints_do_not_count_as_replies(pool: WorkerPool) -> None:
    assert pool.call("after print") is None
    assert pool.call("after sum", 1) == 1


def test_large_and_odd_texts_arrive_unchanged(pool: WorkerPool) -> None:
    for text in ("x" * 1_000_000, "a\ud800\x00\n\u2028b", ""):
        assert pool.call("after text", text) == text


def test_at_most_size_processes_run(pool: WorkerPool) -> None:
    seen: set[int] = set()
    threads = [threading.Thread(target=lambda: seen.add(pool.call("after pid"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(seen) <= 2


def test_the_limit_is_below_the_deadline_of_the_reward_call() -> None:
    pool = WorkerPool(WORK, size=1, cpu_limit_s=1000.0)

    def late() -> None:
        CALL_TIMEOUT_S.set(0.4)
        with pytest.raises(TooMuchWorkError):
            pool.call("after loop")

    Context().run(late)
    pool.close()
