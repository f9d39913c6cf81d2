"""`BatchRewardManager` scores pending responses together."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.protocol import OnFailure, Score
from slipstream.rewards.results import NOT_APPLICABLE
from tests.rewards.helpers import decode, sample


class Lengths:
    """A reward function of lists that records its calls."""

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


def test_pending_responses_are_scored_in_one_call() -> None:
    function = Lengths()
    group = [sample(*range(n)) for n in (1, 3, 2, 5)]
    scores = anyio.run(managed(function).score_group, group)
    assert scores == [Score(float(n), {"acc": 1.0}) for n in (1, 3, 2, 5)]
    assert sum(map(len, function.calls)) == 4
    # The first response starts a call; responses that arrive before that join it.
    assert len(function.calls) <= 2


def test_calls_have_at_most_max_batch_responses_in_order() -> None:
    function = Lengths()
    group = [sample(*range(n)) for n in range(1, 8)]
    manager = managed(function, max_batch=3)
    scores = anyio.run(manager.score_group, group)
    assert [score.value for score in scores] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert max(map(len, function.calls)) <= 3
    scored = [text for call in function.calls for text in call]
    assert scored == [decode(one.response_ids) for one in group]
    # The manager also works in a second event loop.
    assert anyio.run(manager.score_sample, sample(1, 2)).value == 2.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("no"), "ValueError: no"),
        ([1.0], "returned 1 rewards for"),
        ("text", "returned str, not a list of rewards"),
    ],
)
def test_a_failed_call_fails_all_its_responses(result: Any, reason: str) -> None:
    manager = managed(Lengths(result))
    group = [sample(1), sample(2)]
    scores = anyio.run(manager.score_group, group)
    assert [score.value for score in scores] == [0.0, 0.0]
    assert all(reason in (score.failure or "") for score in scores)
    assert manager.failures == 2
    with pytest.raises(RewardError, match=re.escape(reason)):
        anyio.run(managed(Lengths(result), on_failure="stop").score_group, group)


def test_an_invalid_value_fails_only_its_response() -> None:
    scores = anyio.run(managed(Lengths([float("nan"), 2.0])).score_group, [sample(1), sample(2)])
    assert [score.value for score in scores] == [0.0, 2.0]
    assert (scores[0].failure, scores[1].failure) == ("returned nan, not a finite number", None)


class Shy:
    """A reward function of lists that applies only to responses of an odd length."""

    def __call__(self, completion_ids: Any, **kwargs: Any) -> list[float | None]:
        return [float(len(ids)) if len(ids) % 2 else None for ids in completion_ids]


@pytest.mark.parametrize("max_batch", [1, 2, 3, 256])
@pytest.mark.parametrize("on_failure", ["zero", "drop"])
def test_a_none_fails_only_its_response_however_calls_are_batched(
    max_batch: int, on_failure: OnFailure
) -> None:
    manager = managed(Shy(), max_batch=max_batch, on_failure=on_failure)
    scores = anyio.run(manager.score_group, [sample(*range(n)) for n in (1, 2, 3, 4, 5)])
    none = Score(0.0, ok=on_failure == "zero", failure=NOT_APPLICABLE)
    assert scores == [Score(1.0), none, Score(3.0), none, Score(5.0)]
    assert manager.failures == 2


def test_a_none_ends_the_run_if_failures_do() -> None:
    with pytest.raises(RewardError, match=r"returned None: no reward .*on_failure"):
        anyio.run(managed(Shy(), on_failure="stop").score_group, [sample(1), sample(1, 2)])


def test_logs_of_a_call_reach_its_responses() -> None:
    def reward(completions: Any, log_extra: Any, log_metric: Any) -> list[float]:
        log_metric("batch", len(completions))
        log_extra("text", [text.upper() for text in completions])
        return [1.0] * len(completions)

    manager = managed(reward, max_batch=2)
    scores = anyio.run(manager.score_group, [sample(n) for n in range(3)])
    assert [score.extras for score in scores] == [{"text": str(n)} for n in range(3)]
    assert all(score.parts["batch"] in (1.0, 2.0) for score in scores)


def test_a_cancelled_caller_does_not_block_the_others() -> None:
    sizes: list[int] = []

    async def body() -> float:
        started, proceed = anyio.Event(), anyio.Event()

        async def slow(
            data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
        ) -> list[float]:
            sizes.append(len(solution_strs))
            started.set()
            await proceed.wait()
            return [7.0] * len(solution_strs)

        manager = managed(slow)
        async with anyio.create_task_group() as group:
            group.start_soon(manager.score_sample, sample(1))
            await started.wait()
            group.cancel_scope.cancel()
        proceed.set()
        return (await manager.score_sample(sample(2))).value

    assert anyio.run(body) == 7.0
    assert sizes == [1, 1]


def test_single_response_functions_and_invalid_max_batch_are_refused() -> None:
    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return 0.0

    with pytest.raises(
        ConfigError, match=r"reward_manager=batch .*set reward_model\.reward_manager=naive"
    ):
        managed(one)
    with pytest.raises(ConfigError, match="max_batch=0 must be"):
        managed(Lengths(), max_batch=0)
