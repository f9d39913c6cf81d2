"""The RL loop: generate responses, score them, update the policy, publish the weights.

    groups   = rollouts.generate_batch()         responses with rewards
    batch    = rows with advantages              group-relative
    metrics  = backend.forward_backward(batch)   policy gradient; then optim_step
    engines <- backend.publish()                 version + 1

The loop is pure. `run.phases` calls it with objects from `build`. Called from Python:

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

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from slipstream.deadlines import Deadlines
from slipstream.errors import EngineError, TrainingError
from slipstream.loops.learner import CriticUpdates, Learner
from slipstream.loops.rl_batch import KLInReward, failure_of
from slipstream.loops.rl_config import RLTrainingConfig
from slipstream.loops.steps import checkpoint_due
from slipstream.metrics.batch_metrics import rollout_metrics
from slipstream.metrics.loggers import MetricsLogger
from slipstream.metrics.timers import IdleCores, Timers, gen_split, step_split, timing_per_token
from slipstream.rewards.protocol import PRIME, SCORE_PART
from slipstream.rollout.manager import RolloutCounts
from slipstream.threads import usable_cores
from slipstream.training.protocol import ReferencePolicy, TrainingBackend
from slipstream.types import FeatureSink, Group, PolicyVersion, Status, WeightUpdate

__all__ = [
    "AfterStep",
    "DrafterTraining",
    "EpochCounter",
    "FailureWatch",
    "FlatRewardWatch",
    "RLTrainingConfig",
    "RolloutManager",
    "Save",
    "WeightReceiver",
    "publish",
    "run_rl_training",
    "speed_metrics",
]

AfterStep = Callable[[int, Sequence[Group], dict[str, float], Timers], Awaitable[bool]]
"""Called after each step, before its metrics are logged. May add metrics. True ends the loop."""

Save = Callable[[int, bool, Timers], Awaitable[None]]
"""Called after a step's metrics were logged, with the step and whether the loop ends with it. So a
checkpoint saved here never contains a step that is missing in the log."""


STUCK_ROLLOUT = "rollout: a thread of the inference engine does not return"


class EpochCounter(Protocol):
    """What the loop needs from the source of prompts: its epoch, for metrics."""

    @property
    def epoch_id(self) -> int: ...


class RolloutManager(Protocol):
    """Generates and scores groups (`rollout.manager.AsyncRolloutManager`)."""

    @property
    def counts(self) -> RolloutCounts: ...

    @property
    def timeout_s(self) -> float:
        """The deadline in seconds that `generate_batch` enforces itself, if its threads return."""
        ...

    async def generate_batch(self) -> list[Group]: ...


class WeightReceiver(Protocol):
    """What the loop needs from an engine."""

    async def update_weights(self, update: WeightUpdate) -> None: ...


class DrafterTraining(Protocol):
    """Trains a draft head during RL (`drafter.interval`, `drafter.opportunistic`)."""

    @property
    def sink(self) -> FeatureSink:
        """Receives the hidden states of the update pass."""
        ...

    async def begin(self) -> None:
        """Called once, before the first step, so that start-up time is not part of a step."""
        ...

    def rollout(self, step: int) -> AbstractAsyncContextManager[None]:
        """A context manager; its body generates the responses of RL step `step`."""
        ...

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """Called before the update of RL step `step`. The engines generated with policy
        `version`."""
        ...

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """Called after the engines received the new policy, `version`. Returns metrics. Its time
        counts as part of the step."""
        ...


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: EpochCounter,
    rollout_manager: RolloutManager,
    inference_engines: Sequence[WeightReceiver],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    reference: ReferencePolicy | None = None,
    critic: CriticUpdates | None = None,
    kl_in_reward: KLInReward | None = None,
    drafter: DrafterTraining | None = None,
    after_step: AfterStep | None = None,
    save: Save | None = None,
    notify: Callable[[str], None] = print,
    deadlines: Deadlines | None = None,
) -> list[dict[str, float]]:
    """Train the policy with RL and return the metrics of every step.

    `reference` computes log-probs for a KL term or of a teacher model. `critic` computes values for
    GAE. `drafter` trains a draft head from the update pass. `after_step` and `save` are callbacks.

    Raises StageTimeoutError if a stage exceeds its deadline, TrainingError if there is nothing to
    train on, and the errors of the objects that it is given.
    """
    deadlines = deadlines or Deadlines()
    learner = Learner(
        backend,
        config,
        deadlines,
        reference=reference,
        critic=critic,
        kl_in_reward=kl_in_reward,
        sink=None if drafter is None else drafter.sink,
    )
    history: list[dict[str, float]] = []
    watch = FlatRewardWatch(config.flat_reward_warning, notify)
    failures = FailureWatch(
        notify, give_up=config.max_skipped_batches, most=config.max_failed_share
    )
    timers, idle = Timers(), IdleCores(usable_cores())
    if drafter is not None:
        await drafter.begin()
    for step in range(config.start_step + 1, config.num_steps + 1):
        with timers.span("step"):
            async with nullcontext() if drafter is None else drafter.rollout(step):
                with (
                    timers.span("gen"),
                    idle.watched(),
                    deadlines.last_resort(STUCK_ROLLOUT, rollout_manager.timeout_s),
                ):
                    groups = await rollout_manager.generate_batch()
            if (waited := rollout_manager.counts.tool_seconds) > 0:
                timers.move(waited, "gen", "tools")
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
                    await _publish(backend, inference_engines, deadlines)
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
        for reason, count in rollout_manager.counts.dropped.items():
            metrics[f"rollout/num_dropped_groups/{reason}"] = count
        if (generated := rollout_manager.counts.generated) is not None:
            metrics["train/num_gen_batches"] = generated
        failures.see(step, groups)
        watch.see(step, metrics)
        done = await after_step(step, groups, metrics, timers) if after_step is not None else False
        metrics |= speed_metrics(groups, metrics, timers)
        history.append(metrics)
        if metrics_logger is not None and (step % config.log_every == 0 or done):
            metrics_logger.log(step, metrics)
        failures.check(step, last=step == config.num_steps)
        if save is not None and (done or checkpoint_due(step, config)):
            await save(step, done, timers)
        if done:
            break
    return history


async def _publish(
    backend: TrainingBackend, engines: Sequence[WeightReceiver], deadlines: Deadlines
) -> None:
    async with deadlines.stage("weight update", "an engine's update_weights"):
        try:
            await publish(backend, engines)
        except EngineError as error:
            raise TrainingError(
                f"an engine refused the new weights: {error}. If they are not finite, the learning "
                "rate is likely too high: resume from a checkpoint with a lower one"
            ) from error


async def publish(backend: TrainingBackend, engines: Sequence[WeightReceiver]) -> None:
    """Send the current weights to every engine, as the next policy version."""
    for number, engine in enumerate(engines):
        # The iterator over an update's tensors can be used only once, so each engine gets its own.
        await engine.update_weights(backend.publish(advance=number == 0))


def speed_metrics(
    groups: Sequence[Group], metrics: dict[str, float], timers: Timers
) -> dict[str, float]:
    """Metrics of one step: seconds per stage, and tokens per second."""
    timings = gen_split(step_split(timers.collect()), metrics)
    seconds, tokens = timings["timing_s/step"], int(metrics["perf/total_num_tokens"])
    generated = sum(s.num_sampled for group in groups for s in group.members)
    return {
        **timings,
        **timing_per_token(timings, {"gen": generated, "update_actor": tokens}),
        "rollout/tokens_per_second": generated / timings["timing_s/gen"],
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds,
    }


class FailureWatch:
    """Reports each new reason of failed samples once, and ends a run in which no sample
    succeeds, or in which engine or tools failed for more than the share `most` of the last
    `give_up` steps' samples."""

    def __init__(
        self,
        notify: Callable[[str], None],
        *,
        at_most: int = 5,
        give_up: int = 3,
        most: float = 1.0,
    ) -> None:
        self._notify, self._give_up, self._most = notify, give_up, most
        self._recent: deque[tuple[int, int]] = deque(maxlen=give_up)
        self._left = at_most
        self._said: set[str] = set()
        self._scored = self._steps = 0
        self._last = ""

    def see(self, step: int, groups: Sequence[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        failures = list(filter(None, map(failure_of, samples)))
        self._steps += 1
        self._scored += len(samples) - len(failures)
        self._last = failures[-1] if failures else ""
        # Failures of the reward function are `reward_model.on_failure`'s matter.
        failed = sum(
            s.status is Status.FAILED and SCORE_PART not in s.reward_parts for s in samples
        )
        self._recent.append((failed, len(samples)))
        for reason, count in Counter(failures).items():
            if reason not in self._said and self._left:
                self._said.add(reason)
                self._left -= 1
                self._notify(f"warning: step {step}: {count} of {len(samples)} samples: {reason}")

    def check(self, step: int, *, last: bool) -> None:
        """Raise TrainingError if all samples of all steps have failed, after `give_up` steps or at
        the `last` step."""
        if self._scored == 0 and self._last and (last or self._steps >= self._give_up):
            # `slipstream reward` calls the function in the main thread, where it would not fail.
            remedy = (
                ""
                if PRIME in self._last
                else (
                    ". Repair the reward function and try it on the recorded rollouts: slipstream "
                    f"reward RUN/rollouts/{step}.jsonl --fn FILE:NAME"
                )
            )
            raise TrainingError(
                f"no response of the first {self._steps} steps could be scored, so there is "
                f"nothing to learn: {self._last}{remedy}"
            )
        failed, samples = map(sum, zip(*self._recent, strict=True))
        if len(self._recent) == self._give_up and failed > self._most * samples:
            raise TrainingError(
                f"{failed} of {samples} samples of the last {self._give_up} steps failed, more "
                f"than the share {self._most:g} that actor_rollout_ref.rollout.max_failed_share "
                f"allows; the last one: {self._last}. Repair the cause, or raise this share"
            )


class FlatRewardWatch:
    """Warns once, with the likely cause, if all rewards were equal for many steps."""

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
        cause = "the reward function scores every answer as wrong: try it on the recorded rollouts"
        if metrics.get("training/num_failed_rewards", 0.0) > 0:
            cause = "the reward function fails: see `failure` in the recorded rollouts"
        elif metrics.get("response_length/clip_ratio", 0.0) > 0.5:
            cause = "most responses are cut off before they end: raise data.max_response_length"
        elif high > 0:
            cause = "every answer is right: the task is too easy for this model"
        self._notify(
            f"warning: step {step}: in each of the last {self._flat} steps all rewards were equal "
            f"(now {low:g}), so the policy learns nothing. Likely cause: {cause}"
        )
