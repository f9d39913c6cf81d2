"""Advantages and training rows from samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import AdvantageConfig, register_adv_est
from slipstream.algorithms import registry as registry_module
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.functional import (
    GroupStats,
    compute_advantages,
    convert_to_batch,
    group_samples,
    group_stats,
    prepare_grpo_batch,
)
from slipstream.rollout.train_rows import (
    carried_rewards,
    fill_advantages,
    placed_rewards,
    rows_of,
)
from slipstream.types import EpisodeRecord, PlacedReward, Sample, Segment, Status
from tests.rollout.samples import make_prompt, make_sample, respond
from tests.training.helpers import as_rows, by_row


def test_advantages_against_a_baseline() -> None:
    assert compute_advantages([1.0, 0.0, 0.5], 0.25) == [0.75, -0.25, 0.25]


def test_advantages_within_groups() -> None:
    rewards, groups = [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "b"]
    centred = compute_advantages(rewards, groups=groups, norm_adv_by_std_in_grpo=False)
    assert centred == [0.5, 1.0, -0.5, -1.0]
    normed = compute_advantages(rewards, groups=groups)
    assert normed == pytest.approx([2**-0.5, 2**-0.5, -(2**-0.5), -(2**-0.5)], abs=1e-5)
    rloo = compute_advantages(rewards, groups=groups, adv_estimator="rloo")
    assert rloo == [1.0, 2.0, -1.0, -2.0]


def test_a_baseline_and_groups_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"baseline=0\.5 has no meaning for 'grpo'"):
        compute_advantages([1.0], 0.5, groups=["a"])
    with pytest.raises(DataError, match="1 keys for 2 rows"):
        compute_advantages([1.0, 2.0], groups=["a"])


def test_rows_carry_advantages_on_target_tokens_only() -> None:
    samples = [make_sample(0, 1.0, [7, 8, 9]), make_sample(0, 0.0, [7], index=1)]
    batch = prepare_grpo_batch(samples, norm_adv_by_std_in_grpo=False, temperature=0.7)
    assert batch.temperature == 0.7
    first, second = as_rows(batch)
    assert first.tokens == [1, 2, 7, 8, 9]
    assert first.loss_mask == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert first.advantages == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert first.rollout_log_probs == pytest.approx([0.0, 0.0, -0.1, -0.2, -0.3])
    assert first.old_log_probs is None
    assert first.uid == "p0"
    assert second.advantages == [0.0, 0.0, -0.5]


def test_groups_are_cut_by_index_and_not_by_position() -> None:
    samples = [make_sample(g, r) for g, r in [(4, 1.0), (9, 3.0), (4, 0.0), (9, 5.0)]]
    batch = prepare_grpo_batch(samples, norm_adv_by_std_in_grpo=False)
    assert [row.advantages[-1] for row in as_rows(batch) if row.advantages] == [
        0.5,
        -1.0,
        -0.5,
        1.0,
    ]
    assert {k: [s.reward for s in g] for k, g in group_samples(samples).items()} == {
        4: [1.0, 0.0],
        9: [3.0, 5.0],
    }


def test_given_rewards_replace_those_of_the_samples_and_batches_are_taken() -> None:
    samples = [make_sample(0, 0.0), make_sample(0, 0.0)]
    batch = prepare_grpo_batch(convert_to_batch(samples), [2.0, 0.0], norm_adv_by_std_in_grpo=False)
    assert [row.advantages for row in as_rows(batch)] == [[0, 0, 1, 1], [0, 0, -1, -1]]


def test_tool_tokens_between_turns_get_no_advantage() -> None:
    talker = make_sample(0, 1.0, [7])
    talker.append(Segment.given("tool", [5, 5]))
    respond(talker, [8])
    batch = prepare_grpo_batch([talker, make_sample(0, 0.0)], norm_adv_by_std_in_grpo=False)
    assert batch.row(0).advantages == [0.0, 0.0, 0.5, 0.0, 0.0, 0.5]


def test_an_empty_response_counts_in_its_groups_baseline() -> None:
    empty = Sample.from_prompt(make_prompt("p0"), group_index=0, index=1)
    empty.status = Status.COMPLETED
    empty.reward = -1.0
    batch = prepare_grpo_batch([make_sample(0, 1.0), empty], norm_adv_by_std_in_grpo=False)
    assert batch.row(0).advantages == [0.0, 0.0, 1.0, 1.0]
    assert batch.row(1).advantages == [0.0, 0.0]


def test_weighted_masks_do_not_weigh_the_advantage_too() -> None:
    weighted = make_sample(0, 1.0)
    weighted.segments[-1].loss_mask[:] = [0.5, 1.0]
    batch = prepare_grpo_batch([weighted, make_sample(0, 0.0)], norm_adv_by_std_in_grpo=False)
    assert batch.row(0).advantages == [0.0, 0.0, 0.5, 0.5]
    assert batch.row(0).loss_mask == [0.0, 0.0, 0.5, 1.0]


def test_the_first_token_is_never_a_target() -> None:
    sample = Sample(group_index=0, status=Status.COMPLETED, reward=1.0)
    respond(sample, [7, 8])
    batch = prepare_grpo_batch([sample, make_sample(0, 0.0)], norm_adv_by_std_in_grpo=False)
    assert batch.row(0).advantages == [0.0, 0.5]


def test_log_probs_are_given_only_if_a_policy_sampled_all_targets() -> None:
    demonstration = Sample.from_prompt(make_prompt("p0"), group_index=0, index=1)
    demonstration.append(Segment.given("assistant", [7, 8], loss=1.0))
    batch = prepare_grpo_batch([make_sample(0, 1.0), demonstration])
    assert [row.rollout_log_probs for row in as_rows(batch)] == [None, None]


def test_reward_placement_is_the_last_target_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_ADVANTAGES", dict(registry_module._ADVANTAGES))
    seen: dict[str, Any] = {}

    @register_adv_est("spy")
    def spy(*, token_level_rewards: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen.update(kwargs, rewards=token_level_rewards)
        return token_level_rewards.cumsum(-1), token_level_rewards

    talker = make_sample(0, 3.0, [7])
    talker.append(Segment.given("tool", [5]))
    batch = prepare_grpo_batch([talker, make_sample(1, 2.0)], adv_estimator="spy")
    assert seen["rewards"].tolist() == [[0, 0, 3, 0], [0, 0, 0, 2]]
    assert seen["response_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert seen["index"] == [0, 1]
    assert [row.advantages for row in as_rows(batch)] == [[0, 0, 3, 0], [0, 0, 0, 2]]


def test_rewards_of_rejected_tokens_go_to_the_last_target_before_them() -> None:
    batch = prepare_grpo_batch([make_sample(0, 3.0, [7, 8, 9]), make_sample(1, 2.0, [7, 8, 9])])
    given = [[0.0, 0.0, -1.0, -2.0, 4.0], [0.0, 0.0, -1.0, -2.0, 4.0]]
    assert [row.loss_mask for row in as_rows(batch)] == [[0, 0, 1, 1, 1]] * 2

    def carried(*loss_masks: list[int]) -> list[list[float]]:
        batch.loss_mask = torch.tensor(loss_masks).float().flatten()
        return by_row(batch, carried_rewards(batch, torch.tensor(given).double().flatten()))

    assert carried([0, 0, 1, 1, 1], [0, 0, 1, 1, 1]) == given
    # The first one's end says what its beginning earned; before the second one's there is nobody.
    assert carried([0, 0, 1, 0, 0], [0, 0, 0, 1, 0]) == [[0, 0, 1, 0, 0], [0, 0, -1, 2, 0]]
    assert carried([0, 0, 1, 0, 0], [0] * 5)[1] == given[1]


def test_an_estimator_of_wrong_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_ADVANTAGES", dict(registry_module._ADVANTAGES))

    @register_adv_est("per_row")
    def per_row(*, token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(token_level_rewards)), torch.zeros(len(token_level_rewards))

    with pytest.raises(DataError, match=r"returned shape \(1,\) for rewards of shape \(1, 4\)"):
        prepare_grpo_batch([make_sample(0, 1.0)], adv_estimator="per_row")


def test_bad_input_is_refused() -> None:
    lost = make_sample(0)
    lost.group_index = None
    with pytest.raises(DataError, match=r"sample 1 \(uid 'p0'\) has no group_index"):
        prepare_grpo_batch([make_sample(0), lost])
    with pytest.raises(DataError, match="got 1 for 2 samples"):
        prepare_grpo_batch([make_sample(0), make_sample(0)], [1.0])
    with pytest.raises(DataError, match="reward 0 is nan"):
        prepare_grpo_batch([make_sample(0, float("nan"))])
    with pytest.raises(DataError, match="at least one sample"):
        prepare_grpo_batch([])
    with pytest.raises(
        ConfigError, match=r"algorithm\.adv_estimator: unknown .* 'gea' .*; known: gae"
    ):
        prepare_grpo_batch([make_sample(0)], adv_estimator="gea")


def test_group_stats() -> None:
    samples = [make_sample(g, r) for g, r in [(0, 1.0), (1, 0.0), (0, 1.0), (2, 1.0), (1, 1.0)]]
    assert group_stats(samples) == GroupStats(groups=3, zero_variance=1, singletons=1)
    swapped = group_stats(samples, [1.0, 2.0, 0.0, 1.0, 2.0])
    assert swapped == GroupStats(groups=3, zero_variance=1, singletons=1)
    assert group_stats(samples[:2]) == GroupStats(groups=2, zero_variance=0, singletons=2)


def test_rows_with_a_baseline_need_no_company() -> None:
    samples = [make_sample(0, 1.0, [7, 8]), make_sample(1, 0.0, [7], index=1)]
    first, second = as_rows(prepare_grpo_batch(samples, baseline=0.25))
    assert first.advantages == [0.0, 0.0, 0.75, 0.75]
    assert second.advantages == [0.0, 0.0, -0.25]
    with pytest.raises(DataError, match="reward 1 is nan"):
        prepare_grpo_batch(samples, [1.0, float("nan")], baseline=0.0)


def episode(reward: float, rewards: list[PlacedReward], *, index: int = 0) -> Sample:
    """Prompt [1, 2], a turn [7, 8], a tool's answer [3, 4, 5], a turn [9]."""
    sample = make_sample(0, reward, [7, 8], index=index)
    sample.append(Segment.given("tool", [3, 4, 5]))
    respond(sample, [9])
    sample.reward = reward
    sample.episode = EpisodeRecord(turns=2, rewards=rewards)
    return sample


def test_rewards_of_turns_stand_at_the_end_of_their_turn() -> None:
    sample = episode(2.0, [PlacedReward(3, "tool", -0.5), PlacedReward(7, "end", 1.0)])
    batch = rows_of([sample])
    placed = placed_rewards(batch, [2.0], [sample])
    assert placed.tolist() == [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 2.5]


def test_estimators_of_groups_see_the_sum() -> None:
    samples = [
        episode(1.0, [PlacedReward(3, "tool", -0.5)]),
        episode(0.0, [], index=1),
    ]
    batch = prepare_grpo_batch(samples, norm_adv_by_std_in_grpo=False)
    first, second = as_rows(batch)
    assert first.advantages == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.5]
    assert second.advantages == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, 0.0, -0.5]


def test_given_rewards_replace_those_of_turns() -> None:
    samples = [episode(1.0, [PlacedReward(3, "tool", -0.5)]), episode(0.0, [], index=1)]
    batch = prepare_grpo_batch(samples, [3.0, 1.0], norm_adv_by_std_in_grpo=False)
    first, _ = as_rows(batch)
    assert first.advantages == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_returns_equal_those_without_the_answers_of_tools(estimator: str) -> None:
    rewards = [PlacedReward(3, "tool", -0.5), PlacedReward(7, "end", 1.0)]
    with_answer = episode(2.0, rewards)
    without = make_sample(0, 2.0, [7, 8, 9])
    without.episode = EpisodeRecord(rewards=[PlacedReward(3, "tool", -0.5)])
    found = []
    for sample in (with_answer, without):
        batch = rows_of([sample])
        batch.values = torch.where(batch.targets, 0.25, 9.0).double()
        fill_advantages(
            batch,
            placed_rewards(batch, [sample.reward], [sample]),
            [0],
            adv_estimator=estimator,
            config=AdvantageConfig(gamma=0.9, lam=0.8),
        )
        assert batch.returns is not None
        assert batch.advantages is not None
        targets = batch.targets
        found.append([*batch.returns[targets].tolist(), *batch.advantages[targets].tolist()])
    assert found[0] == pytest.approx(found[1])
    assert len(set(found[0])) == 6


def test_rewards_of_turns_stand_in_the_row_of_their_branch() -> None:
    first, sample = make_sample(0, ids=[7, 8, 9]), make_sample(0, 1.5, [6])
    sample.earlier = [first]
    turns = [PlacedReward(3, "tool", -0.5), PlacedReward(2, "end", 1.0, 1)]
    sample.episode = EpisodeRecord(rewards=turns)
    samples = [make_sample(0, 1.0), sample]
    batch = rows_of(samples)
    assert batch.sequences == [0, 1, 3]
    placed = placed_rewards(batch, [1.0, 1.5], samples)
    # Rows of 4, 5 and 3 tokens. The reward without those of turns is 1.0.
    assert by_row(batch, placed) == [[0, 0, 0, 1.0], [0, 0, 0, -0.5, 0], [0, 0, 1.0 + 1.0]]
