"""Tests of mini-batches, usable samples and the KL penalty against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import AdaptiveKLController, AdvantageConfig, FixedKLController
from slipstream.loops.rl_batch import (
    KLInReward,
    batch_metrics,
    first_failure,
    mini_batches,
    usable_samples,
)
from slipstream.rollout.train_rows import (
    fill_advantages,
    placed_rewards,
    prepare_grpo_batch,
    rows_of,
)
from slipstream.training.columns import train_batch
from slipstream.types import (
    Group,
    Prompt,
    Sample,
    Segment,
    Status,
    TrainBatch,
    TrainRow,
    VersionSpan,
)
from tests.training.helpers import as_rows, by_row


def sample(group: int, index: int, reward: float, *, failed: bool = False) -> Sample:
    made = Sample.from_prompt(Prompt(uid=f"p{group}", ids=[1, 2]), group_index=group, index=index)
    made.append(
        Segment(
            role="assistant",
            ids=[5, 6],
            loss_mask=[1.0, 1.0],
            log_probs=[-0.5, -0.5],
            sampling_log_probs=[-0.5, -0.5],
            spans=[VersionSpan(2, 0, 1), VersionSpan(4, 1, 2)],
        )
    )
    made.reward = reward
    made.status = Status.FAILED if failed else Status.COMPLETED
    made.failure = "broken" if failed else None
    return made


def group(index: int, *failed: bool) -> Group:
    samples = [sample(index, i, float(i), failed=f) for i, f in enumerate(failed)]
    return Group(index=index, prompt=Prompt(uid=f"p{index}", ids=[1, 2]), samples=samples)


def test_failed_samples_and_lone_samples_are_left_out() -> None:
    groups = [group(0, False, False), group(1, True, False), group(2, True, True), group(3, False)]
    usable = usable_samples(groups)
    assert [[(s.group_index, s.index) for s in g] for g in usable.groups] == [
        [(0, 0), (0, 1)],
        # A group with a single sample from the start is kept.
        [(3, 0)],
    ]
    assert usable.lone == 1
    assert first_failure(groups) == "sample p1: broken"
    assert first_failure(groups[:1]) == "no sample failed"


def batch(sizes: list[int]) -> TrainBatch:
    rows = [
        TrainRow(tokens=[g, i], loss_mask=[0.0, 1.0], uid="same")
        for g, size in enumerate(sizes)
        for i in range(size)
    ]
    return train_batch(rows, temperature=0.7)


def first_tokens(parts: list[TrainBatch]) -> list[list[int]]:
    return [[row.tokens[0] for row in as_rows(part)] for part in parts]


def test_mini_batches_keep_groups_whole() -> None:
    sizes = [2, 1, 3, 2, 1]
    assert first_tokens(mini_batches(batch(sizes), sizes, 2, shuffle=None)) == [
        [0, 0, 1],
        [2, 2, 2, 3, 3],
        [4],
    ]
    (whole,) = mini_batches(batch(sizes), sizes, None, shuffle=None)
    assert len(whole) == 9
    assert whole.temperature == 0.7


def test_the_seed_determines_the_order_of_groups_in_mini_batches() -> None:
    sizes = [1] * 12

    def order(seed: str) -> list[int]:
        return [
            t
            for part in first_tokens(mini_batches(batch(sizes), sizes, 4, shuffle=seed))
            for t in part
        ]

    assert order("a") == order("a")
    assert order("a") != order("b")
    assert sorted(order("a")) == list(range(12))


def batch_with_log_probs() -> tuple[Tensor, TrainBatch]:
    """Token-level rewards (T,), and a batch with log-probs."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 2.0)]
    made = prepare_grpo_batch(samples, norm_adv_by_std_in_grpo=False)
    made.old_log_probs = torch.tensor([0.0, 0.0, -1.0, -2.0, 9.0, 9.0, -1.0, -1.0])
    made.ref_log_probs = torch.tensor([0.0, 0.0, -1.5, -3.0, 0.0, 0.0, -1.0, -1.0])
    return placed_rewards(made, [1.0, 2.0]), made


def test_the_kl_penalty_is_subtracted_from_each_token() -> None:
    placed, made = batch_with_log_probs()
    rewards_T, metrics = KLInReward(FixedKLController(0.2), "kl").rewards(placed, made)
    # k1 is 0.5 and 1.0 on the targets of row 0, and 0 on those of row 1.
    rewards = by_row(made, rewards_T)
    assert [sum(row) for row in rewards] == pytest.approx([1.0 - 0.2 * 1.5, 2.0])
    assert rewards[0][-2:] == pytest.approx([-0.1, 1.0 - 0.2])
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx((0.75 + 0.0) / 2),
        "actor/reward_kl_penalty_coeff": 0.2,
    }


def test_full_vocabulary_kl_penalty_needs_no_log_probs() -> None:
    placed, made = batch_with_log_probs()
    made.old_log_probs = made.ref_log_probs = None
    penalty = KLInReward(FixedKLController(0.2), "full_forward")
    assert penalty.direction == "forward"
    full_kl = torch.tensor([9.0, 9.0, 0.5, 1.0, 9.0, 9.0, 0.0, 2.0])
    rewards_T, metrics = penalty.rewards(placed, made, full_kl)
    rewards = by_row(made, rewards_T)
    assert rewards[0][-2:] == pytest.approx([-0.1, 1.0 - 0.2])
    assert [sum(row) for row in rewards] == pytest.approx([1.0 - 0.3, 2.0 - 0.4])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.75 + 1.0) / 2)


def test_an_adaptive_kl_coefficient_is_restored() -> None:
    def penalty() -> KLInReward:
        return KLInReward(AdaptiveKLController(0.2, target_kl=0.1, horizon=10), "kl")

    one, other = penalty(), penalty()
    one.rewards(*batch_with_log_probs())
    # The relative error is clipped to 0.2, and there are 2 samples: * (1 + 0.2 * 2 / 10).
    assert one.state_dict() == {"kl_coef": pytest.approx(0.208)}
    other.load_state_dict(one.state_dict())
    theirs, their_metrics = other.rewards(*batch_with_log_probs())
    ours, our_metrics = one.rewards(*batch_with_log_probs())
    assert torch.equal(theirs, ours)
    assert their_metrics == our_metrics


def test_a_fixed_kl_coefficient_comes_from_the_configuration() -> None:
    other = KLInReward(FixedKLController(0.5), "kl")
    other.load_state_dict({"kl_coef": 0.2})
    assert other.state_dict() == {"kl_coef": 0.5}


def test_batch_metrics_cover_only_trained_tokens() -> None:
    usable = usable_samples([group(0, False, False)])
    made = prepare_grpo_batch(usable.samples, norm_adv_by_std_in_grpo=False)
    metrics = batch_metrics(made, [0.0, 1.0], usable, weight_version=5)
    assert metrics["critic/advantages/max"] == 0.5
    assert metrics["critic/advantages/min"] == -0.5
    assert metrics["critic/rewards/mean"] == 0.5
    assert metrics["rollout/staleness/mean"] == 2.0
    assert metrics["rollout/staleness/max"] == 3.0


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo"])
def test_a_failed_sample_changes_no_advantage_of_its_siblings(estimator: str) -> None:
    whole, without = group(0, False, True, False, False), group(0, False, True, False, False)
    whole.samples[1].reward = 100.0
    without.samples.pop(1)
    found = []
    for one in (whole, without):
        (kept,) = usable_samples([one]).groups
        made = rows_of(kept)
        rewards = placed_rewards(made, [s.reward for s in kept], kept)
        keys = [s.group_index for s in kept]
        fill_advantages(made, rewards, keys, adv_estimator=estimator, config=AdvantageConfig())
        assert made.advantages is not None
        found.append(made.advantages)
    assert torch.equal(found[0], found[1])
    assert len(set(found[0].tolist())) > 2
