"""Reinforcement learning: generate, score, update, publish.

    groups   = rollouts.generate_batch()         responses with rewards
    batch    = rows with advantages              group-relative
    metrics  = backend.forward_backward(batch)   policy gradient; then optim_step
    engines <- backend.publish()                 version + 1

A pure loop over what it is given (`loops.build` wires it for the command line). By hand:

    decoder = load_hf_model("model")
    backend = create_pytorch_backend(decoder, lr=1e-6)
    engine = EmbeddedEngine(load_hf_model("model"), EngineSettings(max_model_len=512, dtype=...))
    buffer = DataBuffer(load_prompts("train.jsonl", tokenizer, max_prompt_length=256), seed=1)
    rewards = NaiveRewardManager(my_reward, decode=tokenizer.decode)
    settings = RolloutSettings(
        batch_size=8, n=4, params=SamplingParams(max_tokens=256), seed=1
    )
    rollouts = AsyncRolloutManager([engine], buffer, rewards, settings)
    config = RLTrainingConfig(num_steps=100, max_prompt_length=256, max_response_length=256)
    history = anyio.run(run_rl_training, backend, buffer, rollouts, [engine], config)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import EngineError, TrainingError, check_at_least_one
from slipstream.loops.rl_batch import (
    KLInReward,
    Usable,
    batch_metrics,
    failure_of,
    first_failure,
    mini_batches,
    usable_samples,
)
from slipstream.loops.stages import Stages
from slipstream.loops.steps import checkpoint_due
from slipstream.loops.threads_choice import usable_cores
from slipstream.metrics.batch_metrics import rollout_metrics
from slipstream.metrics.loggers import MetricsLogger
from slipstream.metrics.timers import IdleCores, Timers, step_split, timing_per_token
from slipstream.rollout.manager import RolloutCounts
from slipstream.rollout.train_rows import prepare_grpo_batch
from slipstream.training.losses import LossFn, policy_loss_fn
from slipstream.training.protocol import ReferencePolicy, TrainingBackend
from slipstream.types import FeatureSink, Group, PolicyVersion, TrainBatch, WeightUpdate

AfterStep = Callable[[int, Sequence[Group], dict[str, float], Timers], Awaitable[bool]]
"""Called after each step, before its metrics are logged; may add to them. True ends the loop."""

Save = Callable[[int, bool, Timers], Awaitable[None]]
"""Called when a step's metrics are logged, with the step and whether the loop ends with it: a
checkpoint made here never lacks a line of the log."""


STUCK_ROLLOUT = "rollout: a thread of the inference engine does not return"


class DataBuffer(Protocol):
    """What the loop needs of the prompt supply: where it stands."""

    @property
    def epoch_id(self) -> int: ...


class RolloutManager(Protocol):
    """Where groups come from (`rollout.AsyncRolloutManager`)."""

    @property
    def counts(self) -> RolloutCounts: ...

    @property
    def timeout_s(self) -> float:
        """Deadline that `generate_batch` keeps by itself, as long as its threads return."""
        ...

    async def generate_batch(self) -> list[Group]: ...


class WeightReceiver(Protocol):
    """What the loop needs of an engine."""

    async def update_weights(self, update: WeightUpdate) -> None: ...


class DrafterTraining(Protocol):
    """A draft head that learns beside the policy (`loops.cotrain`)."""

    @property
    def sink(self) -> FeatureSink:
        """Takes the features of the update pass."""
        ...

    async def begin(self) -> None:
        """The first step is about to begin: whatever it takes to start with is no part of it."""
        ...

    def rollout(self, step: int) -> AbstractAsyncContextManager[None]:
        """The responses of RL step `step` are generated in the body."""
        ...

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """The update of RL step `step` is about to begin, of the policy `version` that the engines
        have generated with."""
        ...

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """The engines have the new policy, as `version`; the time is the step's. Returns
        metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RLTrainingConfig:
    """One RL run. `mini_batch_size` counts prompts per optimizer step; None is the whole batch.

    `sync_every` is in steps; `start_step` the number of steps done already (resume). `shuffle` is
    the seed of the order of groups in mini-batches, None keeps their order. The two lengths are the
    rollout's limits, for metrics. A step without any sample to train on is left out; after
    `max_skipped_batches` such in a row the run ends. With `baseline`, advantages are reward -
    `baseline` and `adv_estimator` has no part in them. Every `checkpoint_every` steps, and at the
    end, the loop calls `save`. `noise_seed` is that of rollouts whose engine takes keyed noise.
    """

    num_steps: int
    max_prompt_length: int
    max_response_length: int
    loss: LossFn = field(default_factory=policy_loss_fn)
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    baseline: float | None = None
    temperature: float = 1.0
    mini_batch_size: int | None = None
    ppo_epochs: int = 1
    shuffle: str | None = None
    sync_every: int = 1
    start_step: int = 0
    log_every: int = 1
    flat_reward_warning: int = 10
    max_skipped_batches: int = 3
    checkpoint_every: int = 1
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        check_at_least_one(self, "sync_every", "log_every", "checkpoint_every", "ppo_epochs")

    @property
    def on_policy(self) -> bool:
        """One optimizer step per batch: the policy that samples is the policy that is updated."""
        return self.mini_batch_size is None and self.ppo_epochs == 1 and self.sync_every == 1


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: RolloutManager,
    inference_engines: Sequence[WeightReceiver],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    reference: ReferencePolicy | None = None,
    kl_in_reward: KLInReward | None = None,
    drafter: DrafterTraining | None = None,
    after_step: AfterStep | None = None,
    save: Save | None = None,
    notify: Callable[[str], None] = print,
    stages: Stages | None = None,
) -> list[dict[str, float]]:
    """Train the policy by RL; the metrics of every step.

    `reference` gives the log-probs for a KL term; `drafter` learns from the update. Raises
    StageTimeoutError past a deadline of `stages`, TrainingError where nothing can be trained on,
    and what the parts raise.
    """
    stages = stages or Stages()
    sink = None if drafter is None else drafter.sink
    learner = _Learner(backend, reference, kl_in_reward, sink, config, stages)
    history: list[dict[str, float]] = []
    watch = FlatRewardWatch(config.flat_reward_warning, notify)
    failures = FailureWatch(notify)
    timers, idle = Timers(), IdleCores(usable_cores())
    if drafter is not None:
        await drafter.begin()
    for step in range(config.start_step + 1, config.num_steps + 1):
        with timers.span("step"):
            async with nullcontext() if drafter is None else drafter.rollout(step):
                with (
                    timers.span("gen"),
                    idle.watched(),
                    stages.last_resort(STUCK_ROLLOUT, rollout_manager.timeout_s),
                ):
                    groups = await rollout_manager.generate_batch()
            timers.move(rollout_manager.counts.scoring_seconds, "gen", "reward")
            metrics = rollout_metrics(
                groups,
                max_prompt_length=config.max_prompt_length,
                max_response_length=config.max_response_length,
            )
            if drafter is not None:
                drafter.begin_step(step, backend.weight_version)
            metrics |= await learner.learn(step, groups, timers, notify)
            if step % config.sync_every == 0:
                with timers.span("sync"):
                    await learner.publish(inference_engines)
            if drafter is not None:
                with timers.span("drafter"):
                    metrics |= await drafter.after_step(step, backend.weight_version)
        metrics |= {
            "training/global_step": step,
            "training/epoch": data_buffer.epoch_id,
            "training/policy_version": backend.weight_version,
            "rollout/num_dropped_groups": sum(rollout_manager.counts.dropped.values()),
            "rollout/num_carried_over": rollout_manager.counts.carried_over,
            "rollout/tail_seconds": rollout_manager.counts.tail_seconds,
            "rollout/idle_core_seconds": idle.seconds,
        }
        failures.see(step, groups)
        watch.see(step, metrics)
        done = await after_step(step, groups, metrics, timers) if after_step is not None else False
        metrics |= speed_metrics(groups, metrics, timers)
        history.append(metrics)
        if metrics_logger is not None and (step % config.log_every == 0 or done):
            metrics_logger.log(step, metrics)
        if save is not None and (done or checkpoint_due(step, config)):
            await save(step, done, timers)
        if done:
            break
    return history


class _Learner:
    """The update of one step, with a deadline on each of its stages."""

    def __init__(
        self,
        backend: TrainingBackend,
        reference: ReferencePolicy | None,
        kl_in_reward: KLInReward | None,
        sink: FeatureSink | None,
        config: RLTrainingConfig,
        stages: Stages,
    ) -> None:
        self._backend = backend
        self._reference = reference
        self._kl = kl_in_reward
        self._sink = sink
        self._config = config
        self._stages = stages
        self._skipped_in_a_row = 0

    async def learn(
        self, step: int, groups: Sequence[Group], timers: Timers, notify: Callable[[str], None]
    ) -> dict[str, float]:
        """Advantages, log-probs and all optimizer steps of one batch; a batch without a sample to
        train on changes nothing."""
        usable = usable_samples(groups, compared=self._config.baseline is None)
        metrics = {
            "training/num_lone_samples": float(usable.lone),
            "training/skipped_batch": float(not usable.groups),
        }
        if not usable.groups:
            self._skip(step, groups, notify)
            return metrics
        self._skipped_in_a_row = 0
        with timers.span("adv"):
            batch = self._rows(usable, None)
        await self._fill_log_probs(batch, timers)
        rewards = [sample.reward for sample in usable.samples]
        if self._kl is not None:
            with timers.span("adv"):
                rewards, penalty = self._kl.rewards(usable.samples, batch.rows)
                metrics |= penalty
                for row, fresh in zip(batch.rows, self._rows(usable, rewards).rows, strict=True):
                    row.advantages = fresh.advantages
        if self._config.sync_every > 1:
            # The engines may be some updates behind: the policy that sampled is the old one.
            for row in batch.rows:
                row.old_log_probs = row.rollout_log_probs
        metrics |= batch_metrics(batch, rewards, usable, self._backend.weight_version)
        with timers.span("update_actor"):
            metrics |= await self._update(step, batch, usable)
        return metrics

    async def publish(self, engines: Sequence[WeightReceiver]) -> None:
        """Hand the new weights to every engine, as the next version."""
        async with self._stages.stage("weight update", "an engine's update_weights"):
            try:
                await publish(self._backend, engines)
            except EngineError as error:
                raise TrainingError(
                    f"an engine refused the new weights: {error}. Where they are not finite, the "
                    "learning rate is likely too high: go back to a checkpoint with a lower one"
                ) from error

    def _skip(self, step: int, groups: Sequence[Group], notify: Callable[[str], None]) -> None:
        self._skipped_in_a_row += 1
        reason = first_failure(groups)
        if self._skipped_in_a_row >= self._config.max_skipped_batches:
            raise TrainingError(
                f"no sample could be trained on in {self._skipped_in_a_row} steps in a row (step "
                f"{step}); {reason}. Repair the reward function or the engine, or set "
                "reward_model.on_failure=zero"
            )
        notify(f"step {step}: no sample can be trained on, so there is no update; {reason}")

    def _rows(self, usable: Usable, rewards: Sequence[float] | None) -> TrainBatch:
        c = self._config
        batch = prepare_grpo_batch(
            usable.samples,
            rewards,
            adv_estimator=c.adv_estimator,
            norm_adv_by_std_in_grpo=c.norm_adv_by_std_in_grpo,
            baseline=c.baseline,
            temperature=c.temperature,
        )
        if c.noise_seed is not None:
            for row, sample in zip(batch.rows, usable.samples, strict=True):
                row.key = sample.noise_key(c.noise_seed)
        return batch

    async def _fill_log_probs(self, batch: TrainBatch, timers: Timers) -> None:
        """The old policy's log-probs, where the update is not its own old policy and the rollout's
        will not do, and the reference's."""
        config = self._config
        several = not config.on_policy and config.sync_every == 1
        if several or self._kl is not None:
            with timers.span("old_log_prob"):
                async with self._stages.stage("log-probs", "the policy's forward pass"):
                    old = await self._backend.compute_log_probs(batch)
            for row, values in zip(batch.rows, old, strict=True):
                row.old_log_probs = values
        if self._reference is not None:
            with timers.span("ref"):
                async with self._stages.stage("log-probs", "the reference's forward pass"):
                    ref = await self._reference.compute_log_probs(batch)
            for row, values in zip(batch.rows, ref, strict=True):
                row.ref_log_probs = values

    async def _update(self, step: int, batch: TrainBatch, usable: Usable) -> dict[str, float]:
        """All optimizer steps of one batch; metrics are means over them."""
        config, totals = self._config, dict[str, list[float]]()
        sizes = [len(group) for group in usable.groups]
        for epoch in range(config.ppo_epochs):
            seed = None if config.shuffle is None else f"{config.shuffle}/{step}/{epoch}"
            for mini in mini_batches(batch, sizes, config.mini_batch_size, shuffle=seed):
                async with self._stages.stage("update", "the trainer's optimizer step"):
                    sink = None if epoch else self._sink
                    metrics = dict(
                        await self._backend.forward_backward(mini, config.loss, sink=sink)
                    )
                    metrics |= await self._backend.optim_step()
                for name, value in metrics.items():
                    totals.setdefault(name, []).append(value)
        return {name: _combined(name, values) for name, values in totals.items()}


async def publish(backend: TrainingBackend, engines: Sequence[WeightReceiver]) -> None:
    """Hand the present weights to every engine, as the next version."""
    for number, engine in enumerate(engines):
        # The buckets of an update can be consumed once.
        await engine.update_weights(backend.publish(advance=number == 0))


def speed_metrics(
    groups: Sequence[Group], metrics: dict[str, float], timers: Timers
) -> dict[str, float]:
    """Where the time of a step went, and tokens per second."""
    timings = step_split(timers.collect())
    seconds, tokens = timings["timing_s/step"], int(metrics["perf/total_num_tokens"])
    generated = sum(s.response_length for group in groups for s in group.samples)
    return {
        **timings,
        **timing_per_token(timings, {"gen": generated, "update_actor": tokens}),
        "rollout/tokens_per_second": generated / timings["timing_s/gen"],
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds,
    }


def _combined(name: str, values: Sequence[float]) -> float:
    if name.endswith(("_max", "/skipped_steps")):
        return max(values)
    return sum(values) / len(values)


class FailureWatch:
    """Says each new kind of failure once, with how many samples of the step it took."""

    def __init__(self, notify: Callable[[str], None], *, at_most: int = 5) -> None:
        self._notify = notify
        self._left = at_most
        self._said: set[str] = set()

    def see(self, step: int, groups: Sequence[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        for reason, count in Counter(filter(None, map(failure_of, samples))).items():
            if reason not in self._said and self._left:
                self._said.add(reason)
                self._left -= 1
                self._notify(f"warning: step {step}: {count} of {len(samples)} samples: {reason}")


class FlatRewardWatch:
    """Says once, with the likely cause, when rewards carry no information for many steps."""

    def __init__(self, steps: int, notify: Callable[[str], None]) -> None:
        self._steps = steps
        self._notify = notify
        self._flat = 0
        self._said = False

    def see(self, step: int, metrics: dict[str, float]) -> None:
        low, high = metrics.get("critic/score/min"), metrics.get("critic/score/max")
        self._flat = self._flat + 1 if low is not None and low == high else 0
        if self._flat < self._steps or self._said or low is None or high is None:
            return
        self._said = True
        cause = "the reward function never finds an answer right: try it on the recorded rollouts"
        if metrics.get("training/num_failed_rewards", 0.0) > 0:
            cause = "the reward function fails: see `failure` in the recorded rollouts"
        elif metrics.get("response_length/clip_ratio", 0.0) > 0.5:
            cause = "most responses are cut off before they end: raise data.max_response_length"
        elif high > 0:
            cause = "every answer is right already: the task is too easy for this model"
        self._notify(
            f"warning: step {step}: all rewards of a step have been equal ({low:g} now) for "
            f"{self._flat} steps, so nothing is learned. Likely cause: {cause}"
        )
