"""Tests of the RL loop with all advantage estimators, policy losses and correction settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import anyio
import pytest
import torch
from torch import Tensor

from slipstream.algorithms import (
    AdvantageConfig,
    PFPPOConfig,
    PolicyLossConfig,
    PolicyLossModeConfig,
    RolloutCorrectionConfig,
    adv_estimator_names,
    policy_loss_names,
    policy_loss_selection,
)
from slipstream.deadlines import Deadlines
from slipstream.errors import DataError, TrainingError
from slipstream.loops import learner
from slipstream.loops.rl import run_rl_training
from slipstream.loops.rl_batch import KLInReward, Usable
from slipstream.models.value_model import ValueModel
from slipstream.rewards.protocol import Score
from slipstream.rollout.filters import check_spread
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.training.critic import Critic
from slipstream.training.losses import policy_loss_fn
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ImmediateTrainFuture
from slipstream.training.single import SingleProcessBackend
from slipstream.types import Sample, SamplingParams, TrainBatch
from tests.loops.test_rl import Log, buffer, config, engine
from tests.rollout.samples import make_sample
from tests.training.helpers import as_rows, observe, rows_of, tiny_backend, tiny_decoder, weights

PARTS = AdvantageConfig(gdpo_reward_keys=["even", "short"])


class Scorer:
    """Scores the share of even tokens, with two reward parts. With `equal`, all samples of
    odd-numbered groups get the same reward."""

    def __init__(self, *, equal: bool = False) -> None:
        self._equal = equal

    async def score_sample(self, sample: Sample) -> Score:
        ids = sample.response_ids
        even = sum(1 for i in ids if i % 2 == 0) / len(ids)
        if self._equal and sample.group_index is not None and sample.group_index % 2:
            even = 0.5
        return Score(even, parts={"even": even, "short": 1 / len(ids)})

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return [await self.score_sample(sample) for sample in samples]


def train(
    backend: SingleProcessBackend,
    *,
    greedy: bool = False,
    scorer: Scorer | None = None,
    rollout: dict[str, Any] | None = None,
    filtered: bool = False,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> list[dict[str, float]]:
    """Metrics of two training steps. The log checks that all metric names are known."""
    served, data = engine(), buffer()
    settings = RolloutSettings(
        batch_size=4,
        n=3,
        params=SamplingParams(max_tokens=12),
        seed=1,
        timeout_s=20.0,
        greedy_baseline=greedy,
        **(rollout or {}),
    )
    manager = AsyncRolloutManager(
        [served],
        data,
        scorer or Scorer(),
        settings,
        group_filter=partial(check_spread, metric="even") if filtered else None,
    )
    chosen = config(num_steps=2, **changes)

    async def work() -> list[dict[str, float]]:
        return await run_rl_training(
            backend,
            data,
            manager,
            [served],
            chosen,
            Log(),
            notify=lambda text: None,
            **(given or {}),
        )

    try:
        return anyio.run(work)
    finally:
        backend.close()


@pytest.mark.parametrize("name", adv_estimator_names())
def test_each_advantage_estimator_gets_its_inputs_and_changes_the_weights(name: str) -> None:
    decoder = tiny_decoder()
    backend, reference = tiny_backend(decoder), tiny_backend(tiny_decoder(seed=5))
    critic = Critic(ValueModel.of(decoder), optim=OptimSettings(lr=1e-3))
    before = weights(backend)
    history = train(
        backend,
        greedy=name == "remax",
        adv_estimator=name,
        advantages=PARTS,
        given={
            "critic": critic if name == "gae" else None,
            "reference": reference if name == "on_policy_distillation" else None,
        },
    )
    for metrics in history:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["critic/advantages/max"] > metrics["critic/advantages/min"]
        assert ("critic/vf_loss" in metrics) is (name == "gae")
    after = dict(backend.decoder.named_parameters())
    assert any(not torch.equal(before[n], w) for n, w in after.items())
    reference.close()
    critic.close()


def settings_of(name: str) -> PolicyLossConfig:
    return PolicyLossConfig(
        policy_loss=PolicyLossModeConfig(
            loss_mode=name, dro_beta=0.1, clip_cov_lb=-9, clip_cov_ratio=0.2, kl_cov_ratio=0.2
        )
    )


@pytest.mark.parametrize("name", policy_loss_names())
def test_each_policy_loss_trains_two_mini_batches_per_batch(name: str) -> None:
    loss = settings_of(name)
    select = policy_loss_selection(name)
    history = train(
        tiny_backend(),
        loss=policy_loss_fn(loss_mode=name, config=loss),
        select=None if select is None else partial(select, config=loss),
        mini_batch_size=2,
    )
    assert all(metrics["actor/grad_norm"] > 0 for metrics in history)


def test_token_selection_does_not_depend_on_the_micro_batches() -> None:
    loss = settings_of("kl_cov")
    seen: list[list[list[float] | None]] = []
    shares = []
    for rows in (1, 12):
        backend = tiny_backend(max_rows_per_micro_batch=rows)
        found = observe(backend, lambda batch: [row.selected for row in as_rows(batch)])
        select = policy_loss_selection("kl_cov")
        assert select is not None
        history = train(
            backend,
            loss=policy_loss_fn(loss_mode="kl_cov", config=loss),
            select=partial(select, config=loss),
            mini_batch_size=2,
        )
        shares.append([metrics["actor/pg_loss"] for metrics in history])
        seen += found
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    for rows_of_mini in seen:
        chosen = [value for row in rows_of_mini for value in row or []]
        assert 0 < sum(chosen) < len(chosen)


def test_critic_warmup_trains_only_the_critic() -> None:
    decoder = tiny_decoder()
    backend = tiny_backend(decoder)
    before = weights(backend)
    critic = Critic(ValueModel.of(decoder), optim=OptimSettings(lr=1e-3))
    history = train(
        backend,
        adv_estimator="gae",
        critic_warmup=3,
        critic_epochs=2,
        critic_mini_batch_size=1,
        given={"critic": critic},
    )
    assert all("actor/grad_norm" not in metrics for metrics in history)
    for n, w in backend.decoder.named_parameters():
        assert torch.equal(before[n], w)
    # Values start at 0 and move towards the mean reward, about 0.5.
    assert history[0]["critic/values/max"] == 0.0
    assert history[1]["critic/values/mean"] > 0.0
    assert history[0]["critic/returns/mean"] == pytest.approx(history[0]["critic/score/mean"], 0.2)
    assert history[1]["critic/vf_loss"] < history[0]["critic/vf_loss"]
    # Values that are all 0 explain no variance.
    assert history[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    critic.close()


@pytest.mark.parametrize("critic_warmup", [0, 2])
def test_a_schedule_of_rl_steps_has_one_rate_for_all_optimizer_steps_of_a_step(
    critic_warmup: int,
) -> None:
    decoder = tiny_decoder()
    warmup = {"warmup_steps": 4, "warmup_offset": 0}
    critic = Critic(ValueModel.of(decoder), optim=OptimSettings(lr=1e-3, **warmup))  # type: ignore[arg-type]
    history = train(
        tiny_backend(decoder, optim=OptimSettings(lr=1e-2, **warmup)),  # type: ignore[arg-type]
        adv_estimator="gae",
        mini_batch_size=1,
        critic_warmup=critic_warmup,
        critic_epochs=2,
        critic_mini_batch_size=1,
        schedule_by_rl_step=True,
        critic_schedule_by_rl_step=True,
        given={"critic": critic},
    )
    steps = range(len(history))
    assert len(history) >= 2
    assert [m["critic/lr"] for m in history] == [1e-3 * step / 4 for step in steps]
    first = max(0, critic_warmup - 1)
    assert [m.get("actor/lr") for m in history] == [
        1e-2 * (step - first) / 4 if step >= first else None for step in steps
    ]
    critic.close()


def test_remax_uses_the_greedy_response_as_baseline_but_does_not_train_on_it() -> None:
    backend = tiny_backend()
    rows = observe(backend, rows_of)
    history = train(backend, greedy=True, adv_estimator="remax")
    assert rows == [12, 12]
    assert history[0]["rollout/num_samples"] == 12
    with pytest.raises(DataError, match="needs reward_baselines"):
        train(tiny_backend(), adv_estimator="remax")


def test_importance_weights_of_rollout_correction_change_the_loss() -> None:
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=100.0
    )
    losses = []
    for chosen in (None, correction):
        backend = tiny_backend()
        history = train(backend, correction=chosen)
        losses.append([metrics["actor/grad_norm"] for metrics in history])
    assert "rollout_corr/kl" in history[0]
    # The log-probs of the scripted engine differ from the trainer's, so weights differ from 1.
    assert history[0]["rollout_corr/rollout_is_mean"] != 1.0
    assert losses[0] != losses[1]


def test_each_mini_batch_has_truncated_importance_weights_of_the_old_policy() -> None:
    backend = tiny_backend()
    seen = observe(backend, as_rows)
    train(
        backend,
        correction=RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.01),
        mini_batch_size=1,
    )
    assert len(seen) == 8
    cut = 0
    for row in (row for rows in seen for row in rows):
        assert row.old_log_probs is not None
        assert row.rollout_log_probs is not None
        assert row.rollout_is_weights is not None
        for t, target in enumerate(row.loss_mask):
            ratio = math.exp(row.old_log_probs[t] - row.rollout_log_probs[t])
            target = bool(t and target)
            weight = min(ratio, 1.01) if target else 0.0
            assert row.rollout_is_weights[t] == pytest.approx(weight, rel=1e-5)
            cut += target and ratio > 1.01
    assert cut


def test_bypass_mode_uses_rollout_log_probs_as_old_log_probs() -> None:
    correction = RolloutCorrectionConfig.preset("bypass_ppo_clip")
    backend = tiny_backend()
    seen = observe(backend, as_rows)
    train(backend, correction=correction, loss=policy_loss_fn(loss_mode="bypass_mode"))
    for row in (row for rows in seen for row in rows):
        assert row.old_log_probs == row.rollout_log_probs
        assert row.rollout_log_probs is not None


def test_rollout_correction_without_rollout_log_probs_is_an_error() -> None:
    class WithoutSpans(Scorer):
        async def score_sample(self, sample: Sample) -> Score:
            sample.segments[-1].spans = []
            return await super().score_sample(sample)

    correction = RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(DataError, match="rollout_correction needs rollout log-probs"):
        train(tiny_backend(), scorer=WithoutSpans(), correction=correction)


def test_mismatch_metrics_are_from_the_first_optimizer_step() -> None:
    found = []
    for epochs in (1, 3):
        history = train(tiny_backend(optim=OptimSettings(lr=0.1)), ppo_epochs=epochs)
        found.append({k: v for k, v in history[0].items() if k.startswith("training/rollout_")})
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_the_disabled_preset_still_measures_the_mismatch() -> None:
    history = train(tiny_backend(), correction=RolloutCorrectionConfig.preset("disabled"))
    assert all(metrics["actor/grad_norm"] > 0 for metrics in history)
    assert history[0]["rollout_corr/kl"] != 0.0


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "bypass_pg_is", "bypass_ppo_clip_k3_rs"])
def test_bypass_mode_skips_the_forward_pass_for_old_log_probs(preset: str) -> None:
    correction = RolloutCorrectionConfig.preset(preset)
    if correction.rollout_rs is not None:
        correction = replace(correction, rollout_rs_threshold=1e6)
    loss = PolicyLossConfig(policy_loss=PolicyLossModeConfig(loss_type=correction.loss_type))
    history = train(
        tiny_backend(),
        correction=correction,
        loss=policy_loss_fn(loss_mode="bypass_mode", config=loss),
        mini_batch_size=2,
    )
    assert all("timing_s/old_log_prob" not in metrics for metrics in history)
    assert all(metrics["actor/grad_norm"] > 0 for metrics in history)
    assert ("rollout_corr/kl" in history[0]) is correction.enabled


def test_a_fully_rejected_batch_is_skipped() -> None:
    correction = RolloutCorrectionConfig(rollout_rs="token_k3", rollout_rs_threshold=1e-12)
    backend = tiny_backend()
    history = train(backend, correction=correction)
    assert [metrics["training/skipped_batch"] for metrics in history] == [1.0, 1.0]
    with pytest.raises(TrainingError, match="rollout_correction rejected all tokens"):
        train(tiny_backend(), correction=correction, max_skipped_batches=1)
    # The same if bypass mode rejects in each mini-batch.
    bypass = replace(correction, bypass_mode=True)
    history = train(tiny_backend(), correction=bypass, mini_batch_size=2)
    assert [metrics["training/skipped_batch"] for metrics in history] == [1.0, 1.0]
    assert not any("actor/lr" in metrics for metrics in history)
    with pytest.raises(TrainingError, match="rollout_correction rejected all tokens"):
        train(tiny_backend(), correction=bypass, max_skipped_batches=1)


def test_a_batch_without_target_tokens_is_skipped() -> None:
    class Masks(Scorer):
        async def score_sample(self, sample: Sample) -> Score:
            last = sample.segments[-1]
            last.loss_mask = [0.0] * len(last.ids)
            return await super().score_sample(sample)

    for size in (None, 2):
        history = train(tiny_backend(), scorer=Masks(), mini_batch_size=size)
        assert [metrics["training/skipped_batch"] for metrics in history] == [1.0, 1.0]
    with pytest.raises(TrainingError, match="no response has a token"):
        train(tiny_backend(), scorer=Masks(), max_skipped_batches=1)


class LowEndLogProbs(SingleProcessBackend):
    """A backend whose log-probs equal the rollout's, except for some tokens that are 5 nats lower,
    so that rollout correction rejects them."""

    kept = 0
    """Number of target tokens whose log-probs stay equal; if 0, all except the last token of each
    response."""

    def compute_log_probs(self, batch: TrainBatch, **more: Any) -> Any:
        assert batch.rollout_log_probs is not None
        values = batch.rollout_log_probs.clone()
        if self.kept:
            values -= 5.0
            kept = batch.targets.nonzero()[: self.kept]
            values[kept] = batch.rollout_log_probs[kept]
        else:
            values[[end - 1 for end in batch.starts[1:]]] -= 5.0
        return ImmediateTrainFuture(values)


REJECTED_ENDS = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")


@pytest.mark.parametrize("name", ["remax", "optimal_token_baseline", "grpo"])
def test_a_response_keeps_its_reward_if_its_last_token_is_rejected(name: str) -> None:
    found = []
    for correction in (None, REJECTED_ENDS):
        backend = tiny_backend()
        backend.__class__ = LowEndLogProbs
        seen = observe(
            backend,
            lambda batch: [
                list(zip(r.loss_mask, r.advantages or [], strict=True)) for r in as_rows(batch)
            ],
        )
        train(backend, adv_estimator=name, greedy=name == "remax", correction=correction)
        # Only the first step: in the second one the weights differ.
        found.append(seen[0])
    for plain, corrected in zip(*found, strict=True):
        own = [advantage for mask, advantage in corrected if mask]
        assert len(own) == sum(mask for mask, _ in plain) - 1
        if name == "optimal_token_baseline":
            # Its baselines are weighted by tokens, so they change with the rejected tokens.
            continue
        there = [advantage for mask, advantage in plain if mask]
        assert own == pytest.approx(there[:-1], rel=1e-6)
    assert any(advantage for row in found[1] for _, advantage in row)


def test_a_batch_with_one_remaining_token_is_skipped_if_advantages_are_whitened() -> None:
    class One(LowEndLogProbs):
        kept = 1

    backend = tiny_backend()
    backend.__class__ = One
    # An alias of the estimator's name must be recognized as whitening, too.
    history = train(backend, adv_estimator="reinforce-plus-plus", correction=REJECTED_ENDS)
    assert [metrics["training/skipped_batch"] for metrics in history] == [1.0, 1.0]


def test_a_fully_rejected_mini_batch_is_skipped_before_token_selection() -> None:
    class FirstTwo(SingleProcessBackend):
        """A backend whose log-probs equal the rollout's for the first two groups only."""

        def compute_log_probs(self, batch: TrainBatch, **more: Any) -> Any:
            assert batch.rollout_log_probs is not None
            values = batch.rollout_log_probs.clone()
            if len(batch) == 12:
                values[batch.starts[6] :] -= 5.0
            return ImmediateTrainFuture(values)

    backend = tiny_backend()
    backend.__class__ = FirstTwo
    steps = observe(backend, rows_of)
    loss = settings_of("clip_cov")
    select = policy_loss_selection("clip_cov")
    assert select is not None
    train(
        backend,
        correction=RolloutCorrectionConfig.preset("decoupled_geo_rs"),
        loss=policy_loss_fn(loss_mode="clip_cov", config=loss),
        select=partial(select, config=loss),
        mini_batch_size=2,
    )
    assert steps == [6, 6]


def test_a_failed_score_counts_as_zero_in_all_reward_parts() -> None:
    class Failing(Scorer):
        async def score_sample(self, sample: Sample) -> Score:
            if sample.index == 1:
                return Score(0.0, failure="too late")
            return await super().score_sample(sample)

    history = train(
        tiny_backend(), scorer=Failing(), adv_estimator="gdpo", advantages=PARTS, filtered=True
    )
    assert all(metrics["actor/grad_norm"] > 0 for metrics in history)
    assert history[0]["training/num_failed_rewards"] == 4


def test_a_missing_reward_of_a_turn_is_zero() -> None:
    assert learner._part(Sample(), "turn/look_up") == 0.0
    assert math.isnan(learner._part(Sample(), "format"))


def test_pf_ppo_keeps_the_number_of_rows_and_repeats_some() -> None:
    backend = tiny_backend()
    seen = observe(backend, lambda batch: [tuple(row.tokens) for row in as_rows(batch)])
    train(backend, pf_ppo=PFPPOConfig(reweight_method="max_min"))
    assert [len(rows) for rows in seen] == [12, 12]
    assert all(len(set(rows)) < 12 for rows in seen)


def test_pf_ppo_keeps_the_number_of_optimizer_steps() -> None:
    backend = tiny_backend()
    rows = observe(backend, rows_of)
    train(backend, pf_ppo=PFPPOConfig(reweight_method="max_min"), mini_batch_size=1)
    assert rows == [3] * 8


def test_groups_with_equal_rewards_are_replaced_and_counted() -> None:
    history = train(
        tiny_backend(), scorer=Scorer(equal=True), filtered=True, rollout={"max_rejected": 5.0}
    )
    for metrics in history:
        assert metrics["rollout/num_prompts"] == 4
        assert metrics["training/num_zero_variance_groups"] == 0
        dropped = metrics["rollout/num_dropped_groups/same_even"]
        assert dropped == metrics["rollout/num_dropped_groups"] > 0
        assert metrics["train/num_gen_batches"] == 1 + dropped / 4
    with pytest.raises(DataError, match="max_num_gen_batches"):
        train(
            tiny_backend(), scorer=Scorer(equal=True), filtered=True, rollout={"max_rejected": 0.0}
        )


def test_kl_in_reward_changes_token_level_advantages() -> None:
    from slipstream.algorithms import FixedKLController

    reference = tiny_backend(tiny_decoder(seed=5))
    found: list[Tensor] = []
    for coefficient in (0.0, 0.5):
        backend = tiny_backend()
        history = train(
            backend,
            adv_estimator="reinforce_plus_plus",
            given={
                "reference": reference,
                "kl_in_reward": KLInReward(FixedKLController(coefficient), "k1"),
            },
        )
        found.append(torch.tensor([m["critic/advantages/max"] for m in history]))
    assert history[0]["actor/reward_kl_penalty"] != 0
    assert not torch.equal(found[0], found[1])
    reference.close()


def test_each_branch_is_a_row_with_its_own_noise_key() -> None:
    first, sample = make_sample(0), make_sample(0)
    sample.earlier, sample.branch = [first], 1
    usable = Usable(groups=[[make_sample(0, index=1), sample]], lone=0)
    made = learner.Learner(cast(Any, None), replace(config(), noise_seed=7), Deadlines())._rows(
        usable
    )
    keys = [key for key in made.keys if key is not None]
    assert [(key.index, key.branch, key.seed) for key in keys] == [(1, 0, 7), (0, 0, 7), (0, 1, 7)]
    assert made.sequences == [0, 1, 3]
