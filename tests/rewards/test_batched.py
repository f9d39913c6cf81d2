"""Scoring of many responses in one call."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.protocol import OnFailure, Score
from tests.rewards.helpers import decode, sample


class Lengths:
    """A function of lists that remembers its calls."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[list[str]] = []
        self.result = result

    def __call__(
        self, data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
    ) -> Any:
        self.calls.append(list(solution_strs))
        if isinstance(self.result, Exception):
            raise self.result
        if self.result is not None:
            return self.result
        return [{"score": float(len(text.split())), "acc": 1.0} for text in solution_strs]


def managed(
    function: Any, *, max_batch: int = 256, on_failure: OnFailure = "zero"
) -> BatchRewardManager:
    return BatchRewardManager(
        function, decode=decode, timeout_s=5.0, on_failure=on_failure, max_batch=max_batch
    )


def test_what_waits_is_scored_by_one_call() -> None:
    function = Lengths()
    group = [sample(*range(n)) for n in (1, 3, 2, 5)]
    scores = anyio.run(managed(function).score_group, group)
    assert scores == [Score(float(n), {"acc": 1.0}) for n in (1, 3, 2, 5)]
    assert sum(map(len, function.calls)) == 4
    # The first begins a call; those that came until it began are in it.
    assert len(function.calls) <= 2


def test_calls_are_no_larger_than_asked_and_in_order() -> None:
    function = Lengths()
    group = [sample(*range(n)) for n in range(1, 8)]
    manager = managed(function, max_batch=3)
    scores = anyio.run(manager.score_group, group)
    assert [score.value for score in scores] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert max(map(len, function.calls)) <= 3
    asked = [text for call in function.calls for text in call]
    assert asked == [decode(one.response_ids) for one in group]
    # A manager lives longer than an event loop.
    assert anyio.run(manager.score_sample, sample(1, 2)).value == 2.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("no"), "ValueError: no"),
        ([1.0], "returned 1 rewards for"),
        ("text", "returned str, not a list of rewards"),
        ([None, 1.0], "returned None"),
    ],
)
def test_a_failed_call_is_a_failure_of_each(result: Any, reason: str) -> None:
    manager = managed(Lengths(result))
    group = [sample(1), sample(2)]
    scores = anyio.run(manager.score_group, group)
    assert [score.value for score in scores] == [0.0, 0.0]
    assert all(reason in (score.failure or "") for score in scores)
    assert manager.failures == 2
    with pytest.raises(RewardError, match=re.escape(reason)):
        anyio.run(managed(Lengths(result), on_failure="stop").score_group, group)


def test_one_bad_value_is_its_own_failure() -> None:
    scores = anyio.run(managed(Lengths([float("nan"), 2.0])).score_group, [sample(1), sample(2)])
    assert [score.value for score in scores] == [0.0, 2.0]
    assert (scores[0].failure, scores[1].failure) == ("returned nan, not a finite number", None)


def test_who_gives_up_does_not_hold_up_the_others() -> None:
    asked: list[int] = []

    async def body() -> float:
        started, go_on = anyio.Event(), anyio.Event()

        async def slow(
            data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
        ) -> list[float]:
            asked.append(len(solution_strs))
            started.set()
            await go_on.wait()
            return [7.0] * len(solution_strs)

        manager = managed(slow)
        async with anyio.create_task_group() as group:
            group.start_soon(manager.score_sample, sample(1))
            await started.wait()
            group.cancel_scope.cancel()
        go_on.set()
        return (await manager.score_sample(sample(2))).value

    assert anyio.run(body) == 7.0
    assert asked == [1, 1]


def test_functions_of_single_responses_and_bad_sizes_are_refused() -> None:
    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"calls .*one with lists, and it takes one response"):
        managed(one)
    with pytest.raises(ConfigError, match="max_batch=0 must be a whole number"):
        managed(Lengths(), max_batch=0)
