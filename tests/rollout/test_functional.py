"""Synchronous rollouts: batches of samples through the user's functions."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError, DataError, RewardError
from slipstream.rollout.filters import check_reward_nonzero_std
from slipstream.rollout.functional import (
    RolloutConfig,
    apply_sample_transforms,
    build_batch_metadata,
    compute_response_lengths,
    convert_to_batch,
    extract_sample_fields,
    generate_rollout_batches,
)
from slipstream.types import Prompt, RolloutBatch, Sample, Status
from tests.rollout.samples import make_prompt, make_sample, respond


class Buffer:
    """A source of prompts p0, p1, ... up to `size` that records the requested counts."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.position = 0
        self.requested: list[int] = []

    def get_prompts(self, n: int) -> list[Prompt]:
        self.requested.append(n)
        end = min(self.position + n, self.size)
        out = [make_prompt(f"p{i}", [1, i]) for i in range(self.position, end)]
        self.position = end
        return out


def echo(samples: list[Sample], **kwargs: Any) -> list[Sample]:
    """Respond to each sample with its group and index."""
    assert all(s.status is Status.PENDING and len(s.segments) == 1 for s in samples)
    return [respond(s, [s.group_index or 0, s.index]) for s in samples]


def first(buffer: Buffer, config: RolloutConfig, **kwargs: Any) -> RolloutBatch:
    return next(generate_rollout_batches(buffer, config, **kwargs))


def index_reward(sample: Sample) -> float:
    return float(sample.index)


def test_batch_has_n_samples_per_prompt_and_one_index_per_group() -> None:
    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=2, generate_fn=echo, reward_fn=index_reward
    )
    batches = generate_rollout_batches(Buffer(), config)
    batch = next(batches)
    assert batch.tokens == [[1, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.loss_masks == [[0.0, 0.0, 1.0, 1.0]] * 4
    assert batch.response_lengths == [2, 2, 2, 2]
    assert batch.rewards == [0.0, 1.0, 0.0, 1.0]
    assert batch.metadata["group_indices"] == [0, 0, 1, 1]
    assert next(batches).metadata["group_indices"] == [2, 2, 3, 3]


def test_keyword_arguments_reach_generate_fn() -> None:
    seen: dict[str, Any] = {}

    def generate(samples: list[Sample], **kwargs: Any) -> list[Sample]:
        seen.update(kwargs)
        return echo(samples)

    first(Buffer(), RolloutConfig(batch_size=1, generate_fn=generate), temperature=0.5)
    assert seen == {"temperature": 0.5}


def test_rejected_groups_are_replaced_and_counted() -> None:
    def reward(sample: Sample) -> float:
        # Groups 0, 2, 4, ... have no spread.
        return float(sample.index if (sample.group_index or 0) % 2 else 1)

    buffer = Buffer()
    config = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=2,
        generate_fn=echo,
        reward_fn=reward,
        filter_fn=check_reward_nonzero_std,
    )
    batch = first(buffer, config)
    assert batch.metadata["group_indices"] == [1, 1, 3, 3, 5, 5]
    # Each of the three rounds (3, 2 and 1 prompts) gives one accepted group.
    assert buffer.requested == [3, 2, 1]
    assert batch.metadata["rounds"] == 3
    assert batch.metadata["rejected_groups"] == {"zero_reward_std": 3}


def test_over_sampling_requests_more_prompts_and_drops_the_surplus() -> None:
    buffer = Buffer()
    config = RolloutConfig(batch_size=4, over_sampling_factor=1.3, generate_fn=echo)
    batch = first(buffer, config)
    assert buffer.requested == [6]
    assert batch.metadata["group_indices"] == [0, 1, 2, 3]
    assert batch.metadata["surplus_groups"] == 2


def test_over_sampling_ignores_floating_point_error() -> None:
    buffer = Buffer()  # in floating point 100 * 1.1 is a little more than 110
    first(buffer, RolloutConfig(batch_size=100, over_sampling_factor=1.1, generate_fn=echo))
    assert buffer.requested == [110]


def test_last_batch_of_a_finite_buffer_is_smaller() -> None:
    config = RolloutConfig(batch_size=2, generate_fn=echo)
    sizes = [len(b.samples) for b in generate_rollout_batches(Buffer(5), config)]
    assert sizes == [2, 2, 1]
    assert list(generate_rollout_batches(Buffer(0), config)) == []


def test_error_after_max_rounds_gives_the_filter_reasons() -> None:
    config = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=2,
        generate_fn=echo,
        filter_fn=check_reward_nonzero_std,
        max_rounds=3,
    )
    with pytest.raises(DataError, match=r"0 of 2 groups after 3 rounds.*zero_reward_std': 6"):
        first(Buffer(), config)


def test_failed_and_aborted_samples_are_dropped_and_counted() -> None:
    def generate(samples: list[Sample], **_: Any) -> list[Sample]:
        out = echo(samples)
        out[0].status = Status.FAILED
        out[1].status = Status.ABORTED
        out[2].status = Status.TRUNCATED
        return out

    batch = first(
        Buffer(), RolloutConfig(batch_size=1, n_samples_per_prompt=4, generate_fn=generate)
    )
    assert [s.index for s in batch.samples] == [2, 3]
    assert batch.metadata["dropped_samples"] == {"failed": 1, "aborted": 1}
    assert batch.metadata["status"] == {"truncated": 1, "completed": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [*s, s[0]], "index=0 twice"),
        (lambda s: [*s, make_sample(77)], "group_index=77, index=0 which"),
        (lambda s: [*s[:1], Sample(group_index=None)], "group_index=None, index=0 which"),
    ],
)
def test_rejects_samples_that_were_not_requested(change: Any, message: str) -> None:
    config = RolloutConfig(batch_size=2, generate_fn=lambda samples: change(echo(samples)))
    with pytest.raises(DataError, match=message):
        first(Buffer(), config)


def test_rejects_pending_samples() -> None:
    with pytest.raises(DataError, match=r"status pending; .*Sample\.status"):
        first(Buffer(), RolloutConfig(batch_size=1, generate_fn=lambda samples: samples))


def test_transforms_copy_samples_and_reward_before_filtering() -> None:
    samples = [make_sample(3, 9.0), make_sample(3, 9.0, index=1), make_sample(8, 9.0)]
    config = RolloutConfig(batch_size=1, reward_fn=index_reward, filter_fn=check_reward_nonzero_std)
    result = apply_sample_transforms(samples, config)
    assert [s.reward for s in result.samples] == [0.0, 1.0, 0.0]
    assert [s.reward for s in samples] == [9.0, 9.0, 9.0]
    unrewarded = apply_sample_transforms(
        samples, RolloutConfig(batch_size=1, filter_fn=check_reward_nonzero_std)
    )
    assert [s.group_index for s in unrewarded.samples] == [8]
    assert unrewarded.rejected_groups == {"zero_reward_std": 1}


def test_rejects_a_reward_that_is_not_finite() -> None:
    config = RolloutConfig(batch_size=1, reward_fn=lambda _: float("nan"))
    with pytest.raises(RewardError, match="returned nan for uid 'p0'"):
        apply_sample_transforms([make_sample(0)], config)


def test_convert_to_batch_has_ragged_columns() -> None:
    samples = [make_sample(0, 1.0, [7, 8, 9]), make_sample(1, 0.0, [4])]
    tokens, masks, rewards = extract_sample_fields(samples)
    assert tokens == [[1, 2, 7, 8, 9], [1, 2, 4]]
    assert masks == [[0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    assert rewards == [1.0, 0.0]
    assert compute_response_lengths(masks) == [3, 1]
    batch = convert_to_batch(samples)
    assert (batch.tokens, batch.loss_masks, batch.rewards) == (tokens, masks, rewards)
    assert batch.samples == samples
    with pytest.raises(DataError, match="at least one sample"):
        convert_to_batch([])


def test_batch_metadata() -> None:
    samples = [
        make_sample(0, 1.0, [7, 8, 9]),
        make_sample(1, 0.0, [4]),
        make_sample(1, 0.5, [4, 4]),
    ]
    samples[0].metadata["turns"] = 2
    samples[1].status = Status.TRUNCATED
    samples[2].data_source = "gsm8k"
    assert build_batch_metadata(samples) == {
        "num_samples": 3,
        "num_groups": 2,
        "status": {"completed": 2, "truncated": 1},
        "data_sources": {"": 2, "gsm8k": 1},
        "reward_mean": 0.5,
        "response_length_mean": 2.0,
        "uids": ["p0", "p1", "p1"],
        "group_indices": [0, 1, 1],
        "sample_metadata": [{"turns": 2}, {}, {}],
    }


def test_rejects_impossible_settings() -> None:
    with pytest.raises(ConfigError, match=r"over_sampling_factor=0\.5 must be at least 1"):
        RolloutConfig(batch_size=1, over_sampling_factor=0.5)
    with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
        RolloutConfig(batch_size=0)
    with pytest.raises(ConfigError, match="needs RolloutConfig"):
        generate_rollout_batches(Buffer(), RolloutConfig(batch_size=1))
