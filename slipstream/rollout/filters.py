"""Group filters: decide which groups are trained on.

A filter gets the finished, rewarded samples of one prompt and returns a `FilterResult`; the caller
counts its reasons. Use `functools.partial` to set a filter's arguments. The rollout manager and
`functional` call filters. This module knows nothing about engines or training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError, DataError
from slipstream.rewards.protocol import REWARD_FAILURE, TURN_PART
from slipstream.types import Sample, Status


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Whether to keep a group. `reason` is a fixed word of the filter, for counting; it is empty if
    the group is kept. The result is true in a condition if and only if the group is kept."""

    keep: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.keep


GroupFilter = Callable[[Sequence[Sample]], FilterResult | bool]
"""Takes the samples of one prompt and says whether to keep them. User functions may return a
bool."""

KEEP = FilterResult(True)


def check_reward_nonzero_std(samples: Sequence[Sample]) -> FilterResult:
    """Reject groups in which all rewards are equal: their group-relative advantages are all 0.

    A group of one sample is kept.

    Source: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, eq. 11.
    """
    _refuse_empty(samples)
    if len(samples) > 1 and len({sample.reward for sample in samples}) == 1:
        return FilterResult(False, "zero_reward_std")
    return KEEP


SCORES = ("score", "seq_reward", "seq_final_reward")
"""Values of `metric` in `check_spread` that mean the reward itself."""


def check_spread(samples: Sequence[Sample], metric: str = "score") -> FilterResult:
    """Reject groups in which all samples have the same `metric`: the reward, or a named part of it.

    A group of one sample is kept. Failed samples do not count. Source: like
    `check_reward_nonzero_std`.

    Raises:
        DataError: the reward function returns no part of this name.
    """
    _refuse_empty(samples)
    values = set()
    scored = [sample for sample in samples if sample.status is not Status.FAILED]
    for sample in scored:
        if metric in SCORES:
            values.add(sample.reward)
        elif metric in sample.reward_parts:
            values.add(sample.reward_parts[metric])
        elif REWARD_FAILURE in sample.metadata or metric.startswith(TURN_PART):
            values.add(0.0)  # a failed score counts as 0, as does a turn that there was not
        else:
            raise DataError(
                f"algorithm.filter_groups.metric={metric}: the reward function returns no part of "
                f"this name (it returns: {', '.join(sorted(sample.reward_parts)) or 'none'}); set "
                "algorithm.filter_groups.metric=score, or return this part with the score"
            )
    if len(scored) > 1 and len(values) == 1:
        return FilterResult(False, f"same_{metric}")
    return KEEP


def check_min_reward(samples: Sequence[Sample], min_reward: float = 0.0) -> FilterResult:
    """Reject groups whose mean reward is below `min_reward`."""
    _refuse_empty(samples)
    mean = sum(sample.reward for sample in samples) / len(samples)
    return KEEP if mean >= min_reward else FilterResult(False, "low_mean_reward")


def check_response_diversity(samples: Sequence[Sample], min_unique: float = 0.5) -> FilterResult:
    """Reject groups in which the share of distinct responses, by token ids, is below `min_unique`.

    Raises:
        ConfigError: `min_unique` is not in [0, 1].
    """
    _refuse_empty(samples)
    if not 0 <= min_unique <= 1:
        raise ConfigError(f"min_unique={min_unique} must be a share of responses, from 0 to 1")
    unique = len({tuple(sample.response_ids) for sample in samples})
    if unique < min_unique * len(samples):
        return FilterResult(False, "duplicate_responses")
    return KEEP


def check_reasonable_length(
    samples: Sequence[Sample], min_length: int = 1, max_length: int | None = None
) -> FilterResult:
    """Reject groups with a response shorter than `min_length` or longer than `max_length` tokens.

    Raises:
        ConfigError: no length satisfies both bounds.
    """
    _refuse_empty(samples)
    if max_length is not None and max_length < min_length:
        raise ConfigError(f"max_length={max_length} must not be below min_length={min_length}")
    lengths = [sample.response_length for sample in samples]
    if min(lengths) < min_length:
        return FilterResult(False, "response_too_short")
    if max_length is not None and max(lengths) > max_length:
        return FilterResult(False, "response_too_long")
    return KEEP


def check_quality_and_diversity(
    samples: Sequence[Sample],
    *,
    min_reward: float = 0.0,
    min_unique: float = 0.5,
    min_length: int = 1,
    max_length: int | None = None,
) -> FilterResult:
    """Apply the filters on reward spread, mean reward, diversity and length. The first filter that
    rejects the group gives the reason."""
    for result in (
        check_reward_nonzero_std(samples),
        check_min_reward(samples, min_reward),
        check_response_diversity(samples, min_unique),
        check_reasonable_length(samples, min_length, max_length),
    ):
        if not result:
            return result
    return KEEP


def run_filter(group_filter: GroupFilter | None, samples: Sequence[Sample]) -> FilterResult:
    """Apply a filter. None keeps every group. If a user's filter returns False, its name is the
    reason."""
    if group_filter is None:
        return KEEP
    result = group_filter(samples)
    if isinstance(result, FilterResult):
        return result
    name = getattr(group_filter, "__name__", type(group_filter).__name__)
    return KEEP if result else FilterResult(False, name)


def _refuse_empty(samples: Sequence[Sample]) -> None:
    if not samples:
        raise DataError("a filter got a group without samples; drop empty groups before filtering")
