"""Group filters: accepted and rejected groups, reasons, and impossible settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from slipstream.errors import ConfigError, DataError
from slipstream.rollout.filters import (
    FilterResult,
    GroupFilter,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    check_spread,
    run_filter,
)
from slipstream.types import Sample, Status
from tests.rollout.samples import make_sample


def group(rewards: list[float], responses: list[list[int]] | None = None) -> list[Sample]:
    responses = responses or [[10 + i] for i in range(len(rewards))]
    return [make_sample(0, r, ids) for r, ids in zip(rewards, responses, strict=True)]


KEPT = FilterResult(True)


def rejected(reason: str) -> FilterResult:
    return FilterResult(False, reason)


def test_rejects_groups_with_equal_rewards() -> None:
    assert check_reward_nonzero_std(group([0.0, 1.0])) == KEPT
    assert check_reward_nonzero_std(group([1.0, 1.0])) == rejected("zero_reward_std")
    assert check_reward_nonzero_std(group([0.0])) == KEPT


def test_spread_of_the_reward_or_of_a_part() -> None:
    samples = group([0.0, 1.0])
    for sample, acc in zip(samples, (1.0, 1.0), strict=True):
        sample.reward_parts = {"acc": acc, "score": sample.reward}
    assert check_spread(samples) == check_spread(samples, "seq_reward") == KEPT
    assert check_spread(samples, "acc") == rejected("same_acc")
    with pytest.raises(DataError, match=r"filter_groups\.metric=format.*returns: acc, score"):
        check_spread(samples, "format")
    # A failed sample does not count.
    samples[0].status = Status.FAILED
    assert check_spread(samples) == KEPT
    assert check_spread(group([1.0, 1.0, 1.0])) == rejected("same_score")


def test_a_turn_that_a_sample_does_not_have_counts_as_zero() -> None:
    samples = group([0.0, 1.0])
    samples[0].reward_parts = {"turn/look_up": 0.0}
    assert check_spread(samples, "turn/look_up") == rejected("same_turn/look_up")
    samples[0].reward_parts = {"turn/look_up": -0.5}
    assert check_spread(samples, "turn/look_up") == KEPT


def test_keeps_groups_of_one_like_dapo() -> None:
    assert check_spread(group([0.0])) == KEPT
    assert check_spread(group([0.0, 0.0])) == rejected("same_score")


def test_rejects_groups_with_a_low_mean_reward() -> None:
    assert check_min_reward(group([0.0, 1.0]), 0.5) == KEPT
    assert check_min_reward(group([0.0, 0.9]), 0.5) == rejected("low_mean_reward")


def test_rejects_groups_with_duplicate_responses() -> None:
    same = [[5, 6], [5, 6], [5, 6], [7]]
    assert check_response_diversity(group([0.0] * 4, same), 0.5) == KEPT
    assert check_response_diversity(group([0.0] * 4, same), 0.6) == rejected("duplicate_responses")
    with pytest.raises(ConfigError, match="min_unique=2"):
        check_response_diversity(group([0.0]), 2)


def test_length_counts_the_response_only() -> None:
    samples = group([0.0, 0.0], [[5], [5, 6, 7]])
    assert check_reasonable_length(samples, 1, 3) == KEPT
    assert check_reasonable_length(samples, 2) == rejected("response_too_short")
    assert check_reasonable_length(samples, 1, 2) == rejected("response_too_long")
    with pytest.raises(ConfigError, match=r"max_length=1 .*min_length=2"):
        check_reasonable_length(samples, 2, 1)


def test_combined_filter_gives_the_first_reason() -> None:
    assert check_quality_and_diversity(group([0.0, 1.0])) == KEPT
    assert check_quality_and_diversity(group([1.0, 1.0])) == rejected("zero_reward_std")
    low = check_quality_and_diversity(group([0.0, 1.0]), min_reward=0.6)
    assert low == rejected("low_mean_reward")
    twice = group([0.0, 1.0], [[5], [5]])
    assert check_quality_and_diversity(twice, min_unique=1.0) == rejected("duplicate_responses")
    short = check_quality_and_diversity(group([0.0, 1.0]), min_length=2)
    assert short == rejected("response_too_short")
    long = check_quality_and_diversity(group([0.0, 1.0], [[5], [5, 6]]), max_length=1)
    assert long == rejected("response_too_long")


def test_results_are_truthy_if_kept_and_reasons_can_be_counted() -> None:
    groups = [group([1.0, 1.0]), group([0.0, 1.0]), group([0.0, 0.0])]
    results = [check_reward_nonzero_std(g) for g in groups]
    assert [bool(r) for r in results] == [False, True, False]
    assert Counter(r.reason for r in results if not r) == {"zero_reward_std": 2}


def test_user_filters_may_return_a_bool() -> None:
    def short_prompts(samples: Sequence[Sample]) -> bool:
        return len(samples) > 1

    assert run_filter(short_prompts, group([0.0, 0.0])) == KEPT
    assert run_filter(short_prompts, group([0.0])) == rejected("short_prompts")
    assert run_filter(None, group([0.0])) == KEPT
    bound = partial(check_min_reward, min_reward=2.0)
    assert run_filter(bound, group([1.0])) == rejected("low_mean_reward")


@pytest.mark.parametrize(
    "group_filter",
    [
        check_reward_nonzero_std,
        check_spread,
        check_min_reward,
        check_response_diversity,
        check_reasonable_length,
        check_quality_and_diversity,
    ],
)
def test_rejects_an_empty_group(group_filter: GroupFilter) -> None:
    with pytest.raises(DataError, match="without samples"):
        group_filter([])
