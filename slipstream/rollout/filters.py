"""Which groups are worth training on.

A filter looks at the finished, rewarded samples of one prompt and answers with a `FilterResult`,
whose reason the caller counts. Filters that take settings are bound with `functools.partial`.
Called by the rollout manager and by `functional`. Knows nothing about engines or training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError, DataError
from slipstream.rewards.protocol import REWARD_FAILURE
from slipstream.types import Sample, Status


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Whether to keep a group; `reason` is one of a filter's few fixed words, for counting, and
    empty where the group is kept. True in a condition iff kept."""

    keep: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.keep


GroupFilter = Callable[[Sequence[Sample]], FilterResult | bool]
"""From the samples of one prompt to keep or not; user functions may return a plain bool."""

KEEP = FilterResult(True)


def check_reward_nonzero_std(samples: Sequence[Sample]) -> FilterResult:
    """Reject groups of equal rewards: their group-relative advantages are all 0.

    A group of one is kept, since nothing says that it is uninformative.

    Source: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, eq. 11.
    """
    _refuse_empty(samples)
    if len(samples) > 1 and len({sample.reward for sample in samples}) == 1:
        return FilterResult(False, "zero_reward_std")
    return KEEP


SCORES = ("score", "seq_reward", "seq_final_reward")
"""Names that the reward itself has as a metric of `check_spread`."""


def check_spread(samples: Sequence[Sample], metric: str = "score") -> FilterResult:
    """Reject groups in which all samples have the same `metric`: the reward, or a named part of it.

    A group of one is kept. Failed samples do not count. Source: as `check_reward_nonzero_std`.

    Raises:
        DataError: the reward has no such part.
    """
    _refuse_empty(samples)
    values = set()
    scored = [sample for sample in samples if sample.status is not Status.FAILED]
    for sample in scored:
        if metric in SCORES:
            values.add(sample.reward)
        elif metric in sample.reward_parts:
            values.add(sample.reward_parts[metric])
        elif REWARD_FAILURE in sample.metadata:
            values.add(0.0)  # its scoring failed, which counts as zero
        else:
            raise DataError(
                f"algorithm.filter_groups.metric={metric}: the reward function gives no such part "
                f"(it gives: {', '.join(sorted(sample.reward_parts)) or 'none'}); set "
                "algorithm.filter_groups.metric=score, or return it beside the score"
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
    """Reject groups in which less than the share `min_unique` of responses differ, by their ids.

    Raises:
        ConfigError: `min_unique` is not a share.
    """
    _refuse_empty(samples)
    if not 0 <= min_unique <= 1:
        raise ConfigError(f"min_unique is a share of responses, 0 to 1, got {min_unique}")
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
        raise ConfigError(f"max_length {max_length} is below min_length {min_length}")
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
    """All of the checks on reward spread, mean reward, diversity and length; the first that
    rejects gives the reason."""
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
    """Ask a filter that may be absent, or a user's that returns a plain bool.

    A user filter's rejection without a reason counts under the function's name.
    """
    if group_filter is None:
        return KEEP
    result = group_filter(samples)
    if isinstance(result, FilterResult):
        return result
    name = getattr(group_filter, "__name__", type(group_filter).__name__)
    return KEEP if result else FilterResult(False, name)


def _refuse_empty(samples: Sequence[Sample]) -> None:
    if not samples:
        raise DataError("a filter was asked about a group without samples; drop empty groups")
