"""What one batch of groups teaches: log-probs, advantages, and all optimizer steps.

    rows -> old, reference and teacher log-probs, values -> correction -> rewards less KL
         -> advantages and returns -> critic's update -> policy's update

Every stage has a deadline. Knows backends by protocol, and nothing of engines or of the course of a
run. Called by `loops.rl`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
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
from slipstream.rewards.protocol import REWARD_FAILURE
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

_ALL_REJECTED = "rollout correction rejected every token, or all but one"


class CriticUpdates(Protocol):
    """Values of states, and their update (`training.critic.Critic`)."""

    def values(self, batch: TrainBatch) -> TrainFuture[Tensor]: ...

    def update(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]: ...


class Learner:
    """The update of one step."""

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
        """Advantages, log-probs and all optimizer steps of one batch; a batch without a sample to
        train on changes nothing."""
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
        # A token that is left alone has nothing to be whitened by.
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
        sizes = [len(group) for group in usable.groups]
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
                f"no sample could be trained on in {self._skipped_in_a_row} steps in a row (step "
                f"{step}); {reason}. Repair the reward function or the engine, set "
                "reward_model.on_failure=zero, or reject less (algorithm.rollout_correction)"
            )
        notify(f"step {step}: no sample can be trained on, so there is no update; {reason}")

    def _rows(self, usable: Usable) -> TrainBatch:
        config = self._config
        truncated = config.replay is not None
        batch = rows_of(usable.samples, temperature=config.temperature, truncated=truncated)
        if config.noise_seed is not None:
            batch.keys = [sample.noise_key(config.noise_seed) for sample in usable.samples]
        return batch

    async def _replay(self, batch: TrainBatch, timers: Timers) -> dict[str, float]:
        """Find what a truncating sampler kept, under the weights that it sampled with."""
        cuts, outside = self._config.replay, 0
        if cuts is None:
            return {}
        with timers.span("old_log_prob"):
            async with self._deadlines.stage("log-probs", "the policy's forward pass"):
                kept = await self._backend.compute_kept_ids(batch, cuts)
        for index, ids in enumerate(kept):
            tokens = batch.tokens[batch.slice_of(index)].tolist()
            for token, own in zip(tokens, ids, strict=True):
                if own and token not in own:
                    # Not of these weights, to the bit: the law has to give it some probability.
                    own.append(token)
                    outside += 1
        batch.kept_ids = kept
        return {"rollout_corr/outside_support": float(outside)}

    async def _fill_log_probs(self, batch: TrainBatch, timers: Timers) -> None:
        """The old policy's log-probs, where the update is not its own old policy and the rollout's
        will not do, and the reference's."""
        config, correction = self._config, self._config.correction
        several = not config.on_policy and config.sync_every == 1
        penalised = self._kl is not None and self._kl.direction is None
        needed = penalised or AdvantageNeed.OLD_LOG_PROBS in self._needs
        # Also where it only measures how far the two are apart.
        compared = correction is not None and not correction.bypass_mode
        bypass = correction is not None and correction.bypass_mode
        if (several and not bypass) or needed or compared:
            with timers.span("old_log_prob"):
                async with self._deadlines.stage("log-probs", "the policy's forward pass"):
                    batch.old_log_probs = await self._backend.compute_log_probs(batch)
        if self._reference is not None:
            with timers.span("ref"):
                async with self._deadlines.stage("log-probs", "the reference's forward pass"):
                    batch.ref_log_probs = await self._reference.compute_log_probs(batch)

    async def _full_kl(self, batch: TrainBatch, timers: Timers) -> Tensor | None:
        """The penalty's KL over the whole vocabulary, where it takes that one."""
        if self._kl is None or self._kl.direction is None:
            return None
        with timers.span("ref"):
            async with self._deadlines.stage("log-probs", "the reference's forward pass"):
                return await self._backend.compute_full_kl(batch, self._kl.direction)

    def _correct(self, batch: TrainBatch) -> dict[str, float]:
        """Weights and rejection against the rollout's law, of the policy that starts the update;
        in bypass mode that is left to each mini-batch."""
        correction = self._config.correction
        if correction is None:
            return {}
        _check_recorded(batch)
        if correction.bypass_mode:
            return {}
        assert batch.old_log_probs is not None
        return correct(batch, batch.old_log_probs, correction)

    def _rewards(
        self, batch: TrainBatch, usable: Usable, full_kl: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Token-level rewards (T,) less the KL penalty of all sampled tokens, and metrics."""
        rewards = placed_rewards(batch, [sample.reward for sample in usable.samples])
        return (rewards, {}) if self._kl is None else self._kl.rewards(rewards, batch, full_kl)

    async def _fill_advantages(
        self, batch: TrainBatch, rewards: Tensor, usable: Usable
    ) -> dict[str, float]:
        config, samples = self._config, usable.samples
        sums = [float(sum(row.tolist())) for row in rows_of_column(rewards, batch.starts)]
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
        # The policy that samples may be some updates behind: it is the old one, then.
        behind = config.sync_every > 1 and not _decoupled(config.correction)
        if behind or (config.correction is not None and config.correction.bypass_mode):
            batch.old_log_probs = batch.rollout_log_probs
        return batch_metrics(
            batch, sums, usable, self._backend.weight_version, critic=self._critic is not None
        )

    async def _extra(self, batch: TrainBatch, usable: Usable) -> dict[str, object]:
        """What the estimator needs and batches have no column for."""
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
            extra["sum_pi_squared"] = padded(sums, batch.starts)
        return extra

    def _resampled(
        self, step: int, batch: TrainBatch, usable: Usable
    ) -> tuple[TrainBatch, list[int]]:
        """As many rows, drawn by their scores."""
        config = self._config
        assert config.pf_ppo is not None
        scores = torch.tensor([sample.reward for sample in usable.samples])
        seed = config.seed * 1_000_003 + step
        indices = pf_ppo_indices(scores, config.pf_ppo, seed=seed)
        # Rows in the order of their groups, and cut where the groups were: as many optimizer steps.
        rows = sorted(indices.tolist())
        return select_rows(batch, rows), [len(group) for group in usable.groups]

    async def _update(self, step: int, batch: TrainBatch, sizes: Sequence[int]) -> dict[str, float]:
        """All optimizer steps of one batch; metrics are means over them, but how far rollout and
        trainer are apart is known of the first one alone: the others are of another policy."""
        config, totals = self._config, dict[str, list[float]]()
        order = f"{config.shuffle}/{step}" if config.shuffle is not None else None
        for epoch, mini in _minis(batch, sizes, config.ppo_epochs, config.mini_batch_size, order):
            async with self._deadlines.stage("update", "the trainer's optimizer step"):
                metrics = await self._present(step, epoch, mini)
                if mini.num_target_tokens:
                    sink = None if epoch else self._sink
                    metrics |= await self._backend.forward_backward(mini, config.loss, sink=sink)
                    metrics |= await self._backend.optim_step()
            for name, value in metrics.items():
                totals.setdefault(name, []).append(value)
        return {name: _combined(name, values) for name, values in totals.items()}

    async def _present(self, step: int, epoch: int, mini: TrainBatch) -> dict[str, float]:
        """What is decided over a whole mini-batch by the policy as it is now: in bypass mode
        weights and rejection, and the tokens that the loss treats in its own way."""
        config = self._config
        bypass = config.correction is not None and config.correction.bypass_mode
        corrects = bypass and config.correction is not None and config.correction.enabled
        if (not corrects and config.select is None) or not mini.num_target_tokens:
            return {}
        now = await self._backend.compute_log_probs(mini)
        metrics: dict[str, float] = {}
        if corrects and config.correction is not None:
            metrics = correct(mini, now, config.correction)
        if config.select is not None and mini.num_target_tokens:
            starts = mini.starts
            assert mini.advantages is not None
            selected = config.select(
                padded(now if mini.old_log_probs is None else mini.old_log_probs, starts),
                padded(now, starts),
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
        assert self._critic is not None
        c, totals = self._config, dict[str, list[float]]()
        order = f"{c.critic_shuffle}/{step}" if c.critic_shuffle is not None else None
        for _, mini in _minis(batch, sizes, c.critic_epochs, c.critic_mini_batch_size, order):
            if not mini.num_target_tokens:
                continue
            async with self._deadlines.stage("update", "the critic's optimizer step"):
                metrics = await self._critic.update(mini)
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
    """(epoch, mini-batch) in the order of updates."""
    for epoch in range(epochs):
        seed = None if order is None else f"{order}/{epoch}"
        for mini in mini_batches(batch, sizes, prompts, shuffle=seed):
            yield epoch, mini


def _part(sample: Sample, name: str) -> float:
    """A part of the reward; where scoring failed and counts as zero, so does each part."""
    return sample.reward_parts.get(name, 0.0 if REWARD_FAILURE in sample.metadata else torch.nan)


def correct(
    batch: TrainBatch, log_probs_T: Tensor, correction: RolloutCorrectionConfig
) -> dict[str, float]:
    """Give `batch` importance weights and take rejected tokens out of its loss mask; metrics.

    `log_probs_T` are the policy's, to be compared with what the rollout recorded.
    """
    assert batch.rollout_log_probs is not None
    starts = batch.starts
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
    """Whether the policy that starts the update is a third one between the rollout's and the one
    that is trained."""
    return correction is not None and correction.enabled and not correction.bypass_mode


def _row_keys(batch: TrainBatch) -> Tensor:
    """What tells apart responses that begin alike, wherever they stand."""
    pairs = zip(batch.uids, batch.keys, strict=True)
    return torch.tensor([zlib.crc32(f"{uid}/{key}".encode()) for uid, key in pairs])


def _check_recorded(batch: TrainBatch) -> None:
    if batch.rollout_log_probs is None:
        raise DataError(
            "algorithm.rollout_correction needs the rollout's log-probs of all tokens, and some "
            "were not sampled by the policy; set algorithm.rollout_correction.rollout_is=null, "
            "rollout_rs=null and bypass_mode=false for such data"
        )


def _combined(name: str, values: Sequence[float]) -> float:
    if name.startswith("training/rollout_"):
        return values[0]
    if name.endswith(("_max", "/skipped_steps")):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return sum(values) / len(values)
