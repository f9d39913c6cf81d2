"""The training part of one RL step: log-probs, advantages, and all optimizer steps of a batch.

    rows -> old and reference log-probs -> rewards - KL penalty -> rollout correction
         -> critic values -> advantages and returns -> critic update -> policy update

Every stage has a deadline. This module sees training backends through their protocol. It does not
know engines, checkpoints or the order of a run. Called by `loops.rl`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from slipstream.algorithms import (
    AdvantageNeed,
    RolloutCorrectionConfig,
    adv_needs,
    pf_ppo_indices,
    rollout_correction,
    token_hashes,
)
from slipstream.algorithms.advantages.whiten import WHITENING
from slipstream.algorithms.registry import registered_name
from slipstream.deadlines import Deadlines
from slipstream.errors import DataError, TrainingError
from slipstream.loops.rl_batch import (
    KLInReward,
    Usable,
    batch_metrics,
    first_failure,
    mini_batches,
    usable_samples,
)
from slipstream.loops.rl_config import RLTrainingConfig
from slipstream.metrics.timers import Timers
from slipstream.rewards.protocol import REWARD_FAILURE, TURN_PART
from slipstream.rollout.train_rows import (
    carried_rewards,
    fill_advantages,
    fill_from_baseline,
    placed_rewards,
    rows_of,
)
from slipstream.training.columns import padded, rows_of_column, select_rows, unpadded
from slipstream.training.critic import explained_variance
from slipstream.training.protocol import ReferencePolicy, TrainFuture, TrainingBackend
from slipstream.types import FeatureSink, Group, Sample, TrainBatch

Notify = Callable[[str], None]

_ALL_REJECTED = (
    "algorithm.rollout_correction rejected all tokens, or left fewer than the two tokens that "
    "whitening needs"
)


class CriticUpdates(Protocol):
    """A critic: predicts values and trains on returns (`training.critic.Critic`)."""

    def values(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        """Predicted values (T,) of the states before each token."""
        ...

    def update(
        self, batch: TrainBatch, schedule_step: int | None = None
    ) -> TrainFuture[dict[str, float]]:
        """Run one optimizer step on a mini-batch and return its metrics. `schedule_step` is the
        step of the learning rate schedule, from 0; None for the number of calls so far."""
        ...


class Learner:
    """Runs the training part of RL steps."""

    def __init__(
        self,
        backend: TrainingBackend,
        config: RLTrainingConfig,
        deadlines: Deadlines,
        *,
        reference: ReferencePolicy | None = None,
        critic: CriticUpdates | None = None,
        kl_in_reward: KLInReward | None = None,
        sink: FeatureSink | None = None,
    ) -> None:
        """`reference`: computes reference log-probs. `critic`: for estimators with values.
        `kl_in_reward`: subtracts a KL penalty from rewards. `sink`: receives hidden states of the
        first epoch's forward passes."""
        self._backend = backend
        self._config = config
        self._deadlines = deadlines
        self._reference = reference
        self._critic = critic
        self._kl = kl_in_reward
        self._sink = sink
        self._needs = (
            frozenset[AdvantageNeed]()
            if config.baseline is not None
            else adv_needs(config.adv_estimator)
        )
        self._estimator = registered_name(config.adv_estimator)
        self._skipped_in_a_row = 0

    async def learn(
        self, step: int, groups: Sequence[Group], timers: Timers, notify: Notify
    ) -> dict[str, float]:
        """Train on one batch of scored groups and return the metrics.

        A batch without usable samples or tokens is skipped: the policy does not change and `notify`
        gets a message. Raises TrainingError after `max_skipped_batches` skipped batches in a row,
        and DataError if the batch lacks log-probs or rewards that the configuration needs.
        """
        config = self._config
        usable = usable_samples(
            groups,
            compared=config.compared and config.baseline is None,
            greedy=AdvantageNeed.REWARD_BASELINES in self._needs,
        )
        metrics = {
            "training/num_lone_samples": float(usable.lone),
            "training/skipped_batch": float(not usable.groups),
        }
        if not usable.groups:
            self._skip(step, first_failure(groups), notify)
            return metrics
        batch = self._rows(usable)
        if not batch.num_target_tokens:
            metrics["training/skipped_batch"] = 1.0
            self._skip(step, "no response has a token", notify)
            return metrics
        metrics |= await self._replay(batch, timers)
        await self._fill_log_probs(batch, timers)
        full_kl = await self._full_kl(batch, timers)
        with timers.span("adv"):
            rewards, penalty = self._rewards(batch, usable, full_kl)
            metrics |= penalty | self._correct(batch)
            rewards = carried_rewards(batch, rewards)
        # Whitening a single token would divide by a standard deviation of 0.
        whitens = config.correction is not None and self._estimator in WHITENING
        if batch.num_target_tokens < (2 if whitens else 1):
            metrics["training/skipped_batch"] = 1.0
            self._skip(step, _ALL_REJECTED, notify)
            return metrics
        if self._critic is not None:
            with timers.span("values"):
                async with self._deadlines.stage("values", "the critic's forward pass"):
                    batch.values = await self._critic.values(batch)
        with timers.span("adv"):
            metrics |= await self._fill_advantages(batch, rewards, usable)
        if self._critic is not None and (explained := explained_variance(batch)) is not None:
            metrics["critic/vf_explained_var"] = explained
        sizes = [_rows_in(group) for group in usable.groups]
        if config.pf_ppo is not None:
            batch, sizes = self._resampled(step, batch, usable)
        if self._critic is not None:
            with timers.span("update_critic"):
                metrics |= await self._update_critic(step, batch, sizes)
        if step >= config.critic_warmup:
            with timers.span("update_actor"):
                updated = await self._update(step, batch, sizes)
            metrics |= updated
            if "actor/lr" not in updated:
                metrics["training/skipped_batch"] = 1.0
                self._skip(step, _ALL_REJECTED, notify)
                return metrics
        self._skipped_in_a_row = 0
        return metrics

    def _skip(self, step: int, reason: str, notify: Notify) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._config.max_skipped_batches:
            raise TrainingError(
                f"step {step}: {self._skipped_in_a_row} steps in a row had no sample to train on; "
                f"{reason}. Repair the reward function or the engine, set "
                "reward_model.on_failure=zero, or reject fewer tokens "
                "(algorithm.rollout_correction)"
            )
        notify(f"step {step}: no sample to train on, update skipped; {reason}")

    def _rows(self, usable: Usable) -> TrainBatch:
        """The training batch of all usable samples, with noise keys if the engine can draft."""
        config = self._config
        truncated = config.replay is not None
        batch = rows_of(usable.samples, temperature=config.temperature, truncated=truncated)
        if config.noise_seed is not None:
            batch.keys = [
                branch.noise_key(config.noise_seed)
                for sample in usable.samples
                for branch in sample.branches
            ]
        return batch

    async def _replay(self, batch: TrainBatch, timers: Timers) -> dict[str, float]:
        """With `replay`, set `batch.kept_ids`: the ids that the truncating sampler kept, computed
        again under the weights that it sampled with. Returns the number of sampled tokens that are
        missing from these ids."""
        truncation, outside = self._config.replay, 0
        if truncation is None:
            return {}
        with timers.span("old_log_prob"):
            async with self._deadlines.stage("log-probs", "the policy's forward pass"):
                kept = await self._backend.compute_kept_ids(batch, truncation)
        for index, ids in enumerate(kept):
            tokens = batch.tokens[batch.slice_of(index)].tolist()
            for token, token_kept in zip(tokens, ids, strict=True):
                if token_kept and token not in token_kept:
                    # Rollout and trainer logits differ slightly. A sampled token needs a
                    # probability above 0.
                    token_kept.append(token)
                    outside += 1
        batch.kept_ids = kept
        return {"rollout_corr/outside_support": float(outside)}

    async def _fill_log_probs(self, batch: TrainBatch, timers: Timers) -> None:
        """Set `old_log_probs` if the update needs the trainer's own, and `ref_log_probs` if there
        is a reference policy."""
        config, correction = self._config, self._config.correction
        several_updates = not config.on_policy and config.sync_every == 1
        penalized = self._kl is not None and self._kl.direction is None
        needed = penalized or AdvantageNeed.OLD_LOG_PROBS in self._needs
        # Needed even if the correction is off and only measures the mismatch.
        compared = correction is not None and not correction.bypass_mode
        bypass = correction is not None and correction.bypass_mode
        if (several_updates and not bypass) or needed or compared:
            with timers.span("old_log_prob"):
                async with self._deadlines.stage("log-probs", "the policy's forward pass"):
                    batch.old_log_probs = await self._backend.compute_log_probs(batch)
        if self._reference is not None:
            with timers.span("ref"):
                async with self._deadlines.stage("log-probs", "the reference's forward pass"):
                    batch.ref_log_probs = await self._reference.compute_log_probs(batch)

    async def _full_kl(self, batch: TrainBatch, timers: Timers) -> Tensor | None:
        """KL (T,) over the full vocabulary, for KL penalties that use it; else None."""
        if self._kl is None or self._kl.direction is None:
            return None
        with timers.span("ref"):
            async with self._deadlines.stage("log-probs", "the reference's forward pass"):
                return await self._backend.compute_full_kl(batch, self._kl.direction)

    def _correct(self, batch: TrainBatch) -> dict[str, float]:
        """Apply rollout correction: importance weights and rejection by the log-prob difference of
        trainer and rollout at the start of the update. In bypass mode, `_prepare` corrects each
        mini-batch instead. Raises DataError if rollout log-probs are missing."""
        correction = self._config.correction
        if correction is None:
            return {}
        _check_has_rollout_log_probs(batch)
        if correction.bypass_mode:
            return {}
        assert batch.old_log_probs is not None
        return correct(batch, batch.old_log_probs, correction)

    def _rewards(
        self, batch: TrainBatch, usable: Usable, full_kl: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Token-level rewards (T,) minus the KL penalty, and metrics of the penalty."""
        samples = usable.samples
        rewards = placed_rewards(batch, [sample.reward for sample in samples], samples)
        return (rewards, {}) if self._kl is None else self._kl.rewards(rewards, batch, full_kl)

    async def _fill_advantages(
        self, batch: TrainBatch, rewards: Tensor, usable: Usable
    ) -> dict[str, float]:
        """Set `advantages` (and `returns` with a critic) from token-level rewards (T,). Returns the
        metrics of rewards, advantages and staleness."""
        config, samples = self._config, usable.samples
        sums = [float(sum(row.tolist())) for row in rows_of_column(rewards, batch.sequence_starts)]
        if config.baseline is not None:
            fill_from_baseline(batch, sums, config.baseline)
        else:
            fill_advantages(
                batch,
                rewards,
                [sample.group_index for sample in samples],
                adv_estimator=config.adv_estimator,
                config=config.advantages,
                extra=await self._extra(batch, usable),
            )
        # If the sampling policy may be some updates older, it is the old policy of the loss.
        behind = config.sync_every > 1 and not _decoupled(config.correction)
        if behind or (config.correction is not None and config.correction.bypass_mode):
            batch.old_log_probs = batch.rollout_log_probs
        return batch_metrics(
            batch, sums, usable, self._backend.weight_version, critic=self._critic is not None
        )

    async def _extra(self, batch: TrainBatch, usable: Usable) -> dict[str, object]:
        """Inputs of the advantage estimator that are not columns of a batch, by argument name."""
        extra: dict[str, object] = {}
        if AdvantageNeed.REWARD_BASELINES in self._needs:
            extra["reward_baselines"] = torch.tensor(
                [
                    baseline
                    for group, baseline in zip(usable.groups, usable.baselines, strict=True)
                    for _ in group
                ]
            )
        if AdvantageNeed.REWARD_PARTS in self._needs:
            names = sorted({name for sample in usable.samples for name in sample.reward_parts})
            extra["reward_parts"] = {
                name: torch.tensor([_part(sample, name) for sample in usable.samples])
                for name in names
            }
        if AdvantageNeed.SUM_PI_SQUARED in self._needs:
            async with self._deadlines.stage("log-probs", "the policy's forward pass"):
                sums = await self._backend.compute_sum_pi_squared(batch)
            extra["sum_pi_squared"] = padded(sums, batch.sequence_starts)
        return extra

    def _resampled(
        self, step: int, batch: TrainBatch, usable: Usable
    ) -> tuple[TrainBatch, list[int]]:
        """PF-PPO: the same number of rows, resampled by their scores; and the group sizes."""
        config = self._config
        assert config.pf_ppo is not None
        scores = torch.tensor([sample.reward for sample in usable.samples])
        seed = config.seed * 1_000_003 + step
        indices = pf_ppo_indices(scores, config.pf_ppo, seed=seed)
        # Keep the group order and sizes, so that the number of optimizer steps stays the same.
        chosen = sorted(indices.tolist())
        cuts = batch.sequences or range(len(batch) + 1)
        rows = [row for n in chosen for row in range(cuts[n], cuts[n + 1])]
        ends = accumulate(map(len, usable.groups), initial=0)
        sizes = [
            sum(cuts[n + 1] - cuts[n] for n in chosen[first:last]) for first, last in pairwise(ends)
        ]
        return select_rows(batch, rows), sizes

    async def _update(self, step: int, batch: TrainBatch, sizes: Sequence[int]) -> dict[str, float]:
        """Run all optimizer steps of the policy on one batch. `sizes`: rows of each group.

        Metrics are means over the optimizer steps. The mismatch of rollout and trainer
        (`training/rollout_*`) is from the first step only, because later ones change the policy.
        """
        config, totals = self._config, dict[str, list[float]]()
        order = f"{config.shuffle}/{step}" if config.shuffle is not None else None
        # The policy's first update is in step `critic_warmup`, or in step 1.
        scheduled = step - max(1, config.critic_warmup) if config.schedule_by_rl_step else None
        for epoch, mini in _minis(batch, sizes, config.ppo_epochs, config.mini_batch_size, order):
            async with self._deadlines.stage("update", "the trainer's optimizer step"):
                metrics = await self._prepare(step, epoch, mini)
                if mini.num_target_tokens:
                    sink = None if epoch else self._sink
                    metrics |= await self._backend.forward_backward(mini, config.loss, sink=sink)
                    metrics |= await self._backend.optim_step(scheduled)
            for name, value in metrics.items():
                totals.setdefault(name, []).append(value)
        return {name: _combined(name, values) for name, values in totals.items()}

    async def _prepare(self, step: int, epoch: int, mini: TrainBatch) -> dict[str, float]:
        """Fill the columns of a mini-batch that need log-probs of the current policy: in bypass
        mode importance weights and rejection, and `selected` for losses that select tokens.
        Returns the metrics of the correction."""
        config = self._config
        bypass = config.correction is not None and config.correction.bypass_mode
        corrects = bypass and config.correction is not None and config.correction.enabled
        if (not corrects and config.select is None) or not mini.num_target_tokens:
            return {}
        current = await self._backend.compute_log_probs(mini)
        metrics: dict[str, float] = {}
        if corrects and config.correction is not None:
            metrics = correct(mini, current, config.correction)
        if config.select is not None and mini.num_target_tokens:
            starts = mini.sequence_starts
            assert mini.advantages is not None
            selected = config.select(
                padded(current if mini.old_log_probs is None else mini.old_log_probs, starts),
                padded(current, starts),
                padded(mini.advantages, starts),
                padded(mini.targets, starts),
                hashes=token_hashes(
                    padded(mini.tokens, starts, dtype=torch.int64),
                    (config.seed * 1_000_003 + step) * 1009 + epoch,
                    _row_keys(mini),
                ),
            )
            mini.selected = unpadded(selected.float(), starts)
        return metrics

    async def _update_critic(
        self, step: int, batch: TrainBatch, sizes: Sequence[int]
    ) -> dict[str, float]:
        """Run all optimizer steps of the critic on one batch and return mean metrics."""
        assert self._critic is not None
        c, totals = self._config, dict[str, list[float]]()
        order = f"{c.critic_shuffle}/{step}" if c.critic_shuffle is not None else None
        scheduled = step - 1 if c.critic_schedule_by_rl_step else None
        for _, mini in _minis(batch, sizes, c.critic_epochs, c.critic_mini_batch_size, order):
            if not mini.num_target_tokens:
                continue
            async with self._deadlines.stage("update", "the critic's optimizer step"):
                metrics = await self._critic.update(mini, scheduled)
            for name, value in metrics.items():
                totals.setdefault(name, []).append(value)
        return {name: _combined(name, values) for name, values in totals.items()}


def _minis(
    batch: TrainBatch,
    sizes: Sequence[int],
    epochs: int,
    prompts: int | None,
    order: str | None,
) -> Iterator[tuple[int, TrainBatch]]:
    """Yields (epoch, mini-batch) in training order. `prompts`: groups per mini-batch; None for all.
    `order`: seed of the shuffling; None keeps the order."""
    for epoch in range(epochs):
        seed = None if order is None else f"{order}/{epoch}"
        for mini in mini_batches(batch, sizes, prompts, shuffle=seed):
            yield epoch, mini


def _rows_in(group: Sequence[Sample]) -> int:
    """The number of rows that the samples of a group have in a batch."""
    return sum(len(sample.branches) for sample in group)


def _part(sample: Sample, name: str) -> float:
    """One part of a sample's reward. A missing part is 0 if scoring failed and the reward counts as
    0, and for rewards of turns; otherwise NaN."""
    zero = REWARD_FAILURE in sample.metadata or name.startswith(TURN_PART)
    return sample.reward_parts.get(name, 0.0 if zero else torch.nan)


def correct(
    batch: TrainBatch, log_probs_T: Tensor, correction: RolloutCorrectionConfig
) -> dict[str, float]:
    """Rollout correction: set `rollout_is_weights` and zero `loss_mask` for rejected tokens.

    `log_probs_T` are the trainer's log-probs; they are compared with `batch.rollout_log_probs`.
    Returns the metrics of the correction.
    """
    assert batch.rollout_log_probs is not None
    starts = batch.sequence_starts
    weights, kept, metrics = rollout_correction(
        padded(log_probs_T, starts),
        padded(batch.rollout_log_probs, starts),
        padded(batch.targets, starts),
        correction,
    )
    batch.loss_mask = torch.where(unpadded(kept, starts) != 0, batch.loss_mask, 0.0)
    if weights is not None:
        batch.rollout_is_weights = unpadded(weights, starts)
    return metrics


def _decoupled(correction: RolloutCorrectionConfig | None) -> bool:
    """Whether the loss is decoupled PPO: the old policy (the trainer's at the start of the update)
    is a third policy, next to the rollout's and the current one."""
    return correction is not None and correction.enabled and not correction.bypass_mode


def _row_keys(batch: TrainBatch) -> Tensor:
    """A key of each sequence, independent of its place in the batch. It keeps the tie-break hashes
    of responses with equal first tokens different."""
    rows = range(len(batch)) if batch.sequences is None else batch.sequences[:-1]
    texts = [f"{batch.uids[row]}/{batch.keys[row]}" for row in rows]
    return torch.tensor([zlib.crc32(text.encode()) for text in texts])


def _check_has_rollout_log_probs(batch: TrainBatch) -> None:
    if batch.rollout_log_probs is None:
        raise DataError(
            "algorithm.rollout_correction needs rollout log-probs of all trained tokens, but the "
            "policy did not sample some of them; set "
            "algorithm.rollout_correction.rollout_is=null, rollout_rs=null and bypass_mode=false "
            "for such data"
        )


def _combined(name: str, values: Sequence[float]) -> float:
    """One value of a metric for all optimizer steps of a batch: the first, the maximum, the minimum
    or the mean, depending on its name."""
    if name.startswith("training/rollout_"):
        return values[0]
    if name.endswith(("_max", "/skipped_steps")):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return sum(values) / len(values)
