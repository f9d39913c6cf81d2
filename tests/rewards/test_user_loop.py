"""Users' async functions cannot stop the run's event loop, nor each other for long."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import anyio
import pytest

from slipstream.errors import RewardError
from slipstream.rewards import user_loop
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Score
from tests.rewards.helpers import decode, sample

TEXT = "1"
"""The response on which the functions of these tests misbehave."""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_loop, "GRACE_S", 0.2)


def managed(function: Any, timeout_s: float = 0.2) -> NaiveRewardManager:
    return NaiveRewardManager(function, decode=decode, timeout_s=timeout_s)


def both(manager: NaiveRewardManager) -> tuple[Score, Score]:
    """Return the scores of a response on which the function misbehaves, and of the next one."""

    async def run() -> tuple[Score, Score]:
        return await manager.score_sample(sample(1)), await manager.score_sample(sample(2))

    return anyio.run(run)


def test_a_function_that_ignores_its_cancellation_is_abandoned() -> None:
    over = threading.Event()

    async def function(solution_str: str, **_: Any) -> float:
        while solution_str == TEXT and not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except BaseException:
                continue
        return 1.0

    manager = managed(function)
    assert both(manager) == (Score(0.0, failure="no answer within 0.2 s"), Score(1.0))
    assert (manager.timeouts, manager.abandoned) == (1, 1)
    over.set()


def test_a_function_that_catches_one_cancellation_ends_with_the_next() -> None:
    async def function(solution_str: str, **_: Any) -> float:
        if solution_str == TEXT:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)
        return 1.0

    manager = managed(function)
    assert both(manager) == (Score(0.0, failure="no answer within 0.2 s"), Score(1.0))
    assert manager.abandoned == 0


def test_a_function_that_blocks_costs_only_its_own_answer() -> None:
    over = threading.Event()

    async def function(solution_str: str, **_: Any) -> float:
        if solution_str == TEXT:
            over.wait(60)
        return 1.0

    manager = managed(function)

    async def run() -> list[Score]:
        # The second call waits for the loop that the first one blocks.
        return await manager.score_group([sample(1), sample(2), sample(3)])

    blocked, *others = anyio.run(run)
    assert blocked.failure == "no answer within 0.2 s"
    assert others == [Score(1.0)] * 2
    assert manager.abandoned == 1
    over.set()


def test_a_loop_that_is_stopped_or_whose_tasks_are_cancelled_continues() -> None:
    async def cancels_all(solution_str: str, **_: Any) -> float:
        for task in asyncio.all_tasks() if solution_str == TEXT else ():
            task.cancel()
        await asyncio.sleep(0)
        return 1.0

    async def stops(solution_str: str, **_: Any) -> float:
        if solution_str == TEXT:
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 1.0

    assert both(managed(cancels_all, 20)) == (Score(0.0, failure="CancelledError"), Score(1.0))
    assert both(managed(stops, 20)) == (Score(1.0), Score(1.0))


def test_calls_share_one_loop_across_runs_of_the_managers_loop() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def function(**_: Any) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    manager = managed(function, 20)
    for _ in range(2):  # a user's HTTP session belongs to one loop
        assert anyio.run(manager.score_sample, sample(1)) == Score(1.0)
    assert loops[0] is loops[1]


def test_too_many_blocked_loops_raise() -> None:
    over = threading.Event()

    async def function(**_: Any) -> float:
        over.wait(60)
        return 1.0

    manager = managed(function, 0.01)
    manager._runner.max_abandoned = 1

    async def four() -> None:
        for _ in range(4):
            await manager.score_sample(sample(1))

    with pytest.raises(RewardError, match=r"raise reward_model\.timeout_s"):
        anyio.run(four)
    over.set()


def test_the_users_ctrl_c_ends_the_wait_for_a_function() -> None:
    started = threading.Event()

    async def function(**_: Any) -> float:
        started.set()
        await asyncio.sleep(60)
        return 1.0

    def press() -> None:
        started.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    manager = managed(function, 60)
    thread = threading.Thread(target=press)
    # A process that a shell has started in the background ignores SIGINT, and so would this test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            anyio.run(manager.score_sample, sample(1))
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert manager.failures == 0
