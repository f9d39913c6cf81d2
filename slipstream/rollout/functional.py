"""Rollouts as pure functions: make batches of samples from prompts.

This is the synchronous counterpart of the rollout manager, for scripts, tests and notebooks. The
caller's `generate_fn` generates the responses. Nothing here keeps state or knows engines and
trainers. Samples are grouped by `Sample.group_index`, never by position. `train_rows` turns samples
into training rows; its functions can be imported from here, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.errors import ConfigError, DataError, RewardError, check_at_least_one
from slipstream.rollout.filters import GroupFilter, run_filter
from slipstream.rollout.train_rows import (
    GroupStats,
    compute_advantages,
    group_samples,
    group_stats,
    prepare_grpo_batch,
)
from slipstream.types import Prompt, RolloutBatch, Sample, Status

__all__ = [
    "GenerateFn",
    "GroupStats",
    "PromptBuffer",
    "RolloutConfig",
    "Transformed",
    "apply_sample_transforms",
    "build_batch_metadata",
    "compute_advantages",
    "compute_response_lengths",
    "convert_to_batch",
    "extract_sample_fields",
    "generate_rollout_batches",
    "group_samples",
    "group_stats",
    "prepare_grpo_batch",
]


class PromptBuffer(Protocol):
    """A source of prompts, for example `data.DataBuffer`."""

    def get_prompts(self, n: int) -> list[Prompt]:
        """The next prompts, at most `n`. An empty list means that the data has ended."""
        ...


GenerateFn = Callable[..., list[Sample]]
"""`generate_fn(samples, **rollout_kwargs) -> samples`.

It gets pending samples, each with its prompt as first segment, `group_index` and `index`. It
returns them with responses and a status. It may leave samples out, but must not add any.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Settings of `generate_rollout_batches`.

    `batch_size` counts prompts; each gets `n_samples_per_prompt` responses, which form a group.
    Each round asks for `over_sampling_factor` (>= 1) times the missing prompts. The first groups
    that pass `filter_fn` fill the batch; the rest is dropped. It is an error if a batch is not full
    after `max_rounds` rounds of generation.
    """

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: GenerateFn | None = None
    reward_fn: Callable[[Sample], float] | None = None
    filter_fn: GroupFilter | None = None
    max_rounds: int = 10

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "batch_size", "n_samples_per_prompt", "over_sampling_factor", "max_rounds"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed:
    """The samples that `apply_sample_transforms` kept, and counts of the others.

    `rejected_groups` counts groups by the filter's reason. `dropped_samples` counts samples by
    status.
    """

    samples: list[Sample]
    rejected_groups: Mapping[str, int]
    dropped_samples: Mapping[str, int]


def generate_rollout_batches(
    data_buffer: PromptBuffer, config: RolloutConfig, **rollout_kwargs: Any
) -> Iterator[RolloutBatch]:
    """Yield batches of generated, rewarded and filtered samples until the prompts end.

    `rollout_kwargs` are passed to `config.generate_fn`. Group indices count from 0. The last batch
    may be smaller. `metadata` has the keys of `build_batch_metadata`, and `rounds`,
    `rejected_groups`, `dropped_samples` and `surplus_groups`.

    Raises:
        ConfigError: `generate_fn` is None.
        DataError: `generate_fn` returned wrong samples, or a batch is not full after `max_rounds`.
        RewardError: `reward_fn` returned a number that is not finite.
    """
    generate_fn = config.generate_fn
    if generate_fn is None:
        raise ConfigError("generate_rollout_batches needs RolloutConfig.generate_fn, got None")

    def batches() -> Iterator[RolloutBatch]:
        next_group = 0
        exhausted = False
        while not exhausted:
            groups: list[list[Sample]] = []
            rejected: Counter[str] = Counter()
            dropped: Counter[str] = Counter()
            rounds = 0
            while len(groups) < config.batch_size:
                if rounds == config.max_rounds:
                    raise DataError(
                        f"{len(groups)} of {config.batch_size} groups after {rounds} rounds of "
                        f"generation; groups rejected: {dict(rejected)}, samples dropped: "
                        f"{dict(dropped)}. Relax filter_fn, raise over_sampling_factor or "
                        f"max_rounds, or use easier prompts"
                    )
                missing = config.batch_size - len(groups)
                # In floating point 100 * 1.1 is a little more than 110; it must count as 110.
                count = math.ceil(missing * config.over_sampling_factor - 1e-9)
                prompts = data_buffer.get_prompts(count)
                if not prompts:
                    exhausted = True
                    break
                pending = _pending(prompts, next_group, config.n_samples_per_prompt)
                next_group += len(prompts)
                generated = generate_fn(pending, **rollout_kwargs)
                _check_generated(generated, pending)
                result = apply_sample_transforms(generated, config)
                groups.extend(group_samples(result.samples).values())
                rejected.update(result.rejected_groups)
                dropped.update(result.dropped_samples)
                rounds += 1
            if groups:
                batch = convert_to_batch([s for g in groups[: config.batch_size] for s in g])
                batch.metadata.update(
                    rounds=rounds,
                    rejected_groups=dict(rejected),
                    dropped_samples=dict(dropped),
                    surplus_groups=max(len(groups) - config.batch_size, 0),
                )
                yield batch

    return batches()


def apply_sample_transforms(samples: Sequence[Sample], config: RolloutConfig) -> Transformed:
    """Reward each sample, then filter each group, because filters use rewards.

    Failed and aborted samples are dropped and counted first. The input samples are not changed. If
    `reward_fn` is None, samples keep their rewards. Exceptions of `reward_fn` propagate; use a
    reward manager to handle them differently.

    Raises:
        DataError: a sample without `group_index`.
        RewardError: `reward_fn` returned a number that is not finite.
    """
    dropped: Counter[str] = Counter()
    rewarded: list[Sample] = []
    for sample in samples:
        if sample.status in (Status.FAILED, Status.ABORTED):
            dropped[sample.status.value] += 1
        elif config.reward_fn is None:
            rewarded.append(sample)
        else:
            rewarded.append(replace(sample, reward=_reward(config.reward_fn, sample)))

    kept: list[Sample] = []
    rejected: Counter[str] = Counter()
    for group in group_samples(rewarded).values():
        result = run_filter(config.filter_fn, group)
        if result:
            kept.extend(group)
        else:
            rejected[result.reason] += 1
    return Transformed(samples=kept, rejected_groups=dict(rejected), dropped_samples=dict(dropped))


def convert_to_batch(samples: Sequence[Sample]) -> RolloutBatch:
    """A batch with the samples as ragged columns, in their order.

    Raises:
        DataError: no samples.
    """
    tokens, loss_masks, rewards = extract_sample_fields(samples)
    return RolloutBatch(
        tokens=tokens,
        loss_masks=loss_masks,
        rewards=rewards,
        response_lengths=compute_response_lengths(loss_masks),
        metadata=build_batch_metadata(samples),
        samples=list(samples),
    )


def extract_sample_fields(
    samples: Sequence[Sample],
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """(tokens, loss masks, rewards), one entry per sample; prompt tokens are included."""
    return (
        [list(sample.tokens) for sample in samples],
        [list(sample.loss_mask) for sample in samples],
        [sample.reward for sample in samples],
    )


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """The number of tokens with loss in each sample, that is, tokens that the policy wrote."""
    return [sum(1 for m in mask if m) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample]) -> dict[str, Any]:
    """Counts, means, and per-sample columns of a batch, in the samples' order.

    Keys: `num_samples`, `num_groups` (without samples that have no `group_index`), `status` and
    `data_sources` (counts), `reward_mean`, `response_length_mean` (tokens with loss), and the
    columns `uids`, `group_indices`, `sample_metadata`.

    Raises:
        DataError: no samples.
    """
    if not samples:
        raise DataError("a batch needs at least one sample, got none")
    lengths = compute_response_lengths([sample.loss_mask for sample in samples])
    indices = [sample.group_index for sample in samples]
    return {
        "num_samples": len(samples),
        "num_groups": len({index for index in indices if index is not None}),
        "status": dict(Counter(sample.status.value for sample in samples)),
        "data_sources": dict(Counter(sample.data_source for sample in samples)),
        "reward_mean": sum(sample.reward for sample in samples) / len(samples),
        "response_length_mean": sum(lengths) / len(samples),
        "uids": [sample.uid for sample in samples],
        "group_indices": indices,
        "sample_metadata": [sample.metadata for sample in samples],
    }


def _pending(prompts: Sequence[Prompt], first_group: int, n: int) -> list[Sample]:
    return [
        Sample.from_prompt(prompt, group_index=group, index=index)
        for group, prompt in enumerate(prompts, first_group)
        for index in range(n)
    ]


def _check_generated(generated: Sequence[Sample], pending: Sequence[Sample]) -> None:
    requested = {(sample.group_index, sample.index) for sample in pending}
    seen: set[tuple[int | None, int]] = set()
    for sample in generated:
        key = (sample.group_index, sample.index)
        if key not in requested or key in seen:
            problem = "twice" if key in seen else "which it did not get"
            raise DataError(
                f"generate_fn returned group_index={key[0]}, index={key[1]} {problem}; it must "
                f"return the samples that it got, each at most once"
            )
        seen.add(key)
        if sample.status is Status.PENDING:
            raise DataError(
                f"generate_fn returned group_index={key[0]}, index={key[1]} with status pending; "
                f"it must set Sample.status (completed, truncated, failed, ...)"
            )


def _reward(reward_fn: Callable[[Sample], float], sample: Sample) -> float:
    reward = float(reward_fn(sample))
    if not math.isfinite(reward):
        raise RewardError(
            f"reward_fn returned {reward} for uid {sample.uid!r}, index {sample.index}; it must be "
            f"a finite number"
        )
    return reward
