"""Tests of the RL loop with a scripted engine and a tiny training backend."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from slipstream.data.data_buffer import DataBuffer
from slipstream.deadlines import Deadlines
from slipstream.errors import ConfigError, RewardError, StageTimeoutError, TrainingError
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.loops.rl import (
    FailureWatch,
    FlatRewardWatch,
    RLTrainingConfig,
    publish,
    run_rl_training,
)
from slipstream.metrics.names import check_names
from slipstream.metrics.timers import STEP_PARTS, Timers
from slipstream.rewards.protocol import PRIME, Score, apply_score
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.training.protocol import TrainFuture
from slipstream.training.single import SingleProcessBackend
from slipstream.types import (
    GenerateRequest,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    TrainBatch,
    WeightUpdate,
)
from tests.training.helpers import VOCAB, observe, rows_of, tiny_backend, weights

EOS = 63


class Scorer:
    """Scores the share of even tokens, or calls the given score function."""

    def __init__(self, score: Callable[[Sample], Score] | None = None) -> None:
        self._score = score

    async def score_sample(self, sample: Sample) -> Score:
        if self._score is not None:
            return self._score(sample)
        ids = sample.response_ids
        return Score(sum(1 for i in ids if i % 2 == 0) / len(ids))

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return [await self.score_sample(sample) for sample in samples]


class Log:
    """Keeps logged metrics and raises if a metric name is unknown."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        check_names(metrics)
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        pass


def script(request: GenerateRequest) -> list[int]:
    rng = random.Random(repr(request.key))
    return [*(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(2, 9))), EOS]


def engine() -> FakeEngine:
    return FakeEngine(ScriptedCore(script, vocab_size=VOCAB, max_model_len=64, eos_token_ids=[EOS]))


def buffer() -> DataBuffer:
    return DataBuffer([Prompt(uid=f"p{i}", ids=[1, 2, 3]) for i in range(10)], seed=1)


def rollouts(
    engines: Sequence[FakeEngine], data: DataBuffer, scorer: Scorer | None = None
) -> AsyncRolloutManager:
    settings = RolloutSettings(
        batch_size=4, n=3, params=SamplingParams(max_tokens=12), seed=1, timeout_s=20.0
    )
    return AsyncRolloutManager(engines, data, scorer or Scorer(), settings)


def config(**changes: Any) -> RLTrainingConfig:
    values = {"num_steps": 3, "max_prompt_length": 8, "max_response_length": 12, **changes}
    return RLTrainingConfig(**values)


def train(
    backend: SingleProcessBackend,
    config: RLTrainingConfig,
    scorer: Scorer | None = None,
    **more: Any,
) -> tuple[list[dict[str, float]], Log, FakeEngine]:
    served, data, log = engine(), buffer(), Log()
    more.setdefault("notify", lambda text: None)

    async def work() -> list[dict[str, float]]:
        return await run_rl_training(
            backend, data, rollouts([served], data, scorer), [served], config, log, **more
        )

    try:
        return anyio.run(work), log, served
    finally:
        backend.close()


def test_three_steps_train_publish_weights_and_log_known_metrics() -> None:
    backend = tiny_backend()
    before = weights(backend)
    history, log, served = train(backend, config())
    assert [step for step, _ in log.lines] == [1, 2, 3]
    assert history == [metrics for _, metrics in log.lines]
    assert [m["training/policy_version"] for m in history] == [1, 2, 3]
    assert served.stats().version == 3
    assert any(not torch.equal(before[n], w) for n, w in backend.decoder.named_parameters())
    for metrics in history:
        assert metrics["rollout/num_prompts"] == 4
        assert metrics["rollout/num_samples"] == 12
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/ppo_kl"] == 0.0
        assert metrics["rollout/staleness/max"] == 0.0
        assert metrics["training/skipped_batch"] == 0.0
        assert metrics["critic/rewards/mean"] == pytest.approx(metrics["critic/score/mean"])
        assert metrics["timing_s/step"] >= metrics["timing_s/gen"] > 0
        assert metrics["timing_s/update_actor"] > 0
        assert metrics["timing_per_token_ms/gen"] > 0
        parts = [metrics.get(f"timing_s/{name}", 0.0) for name in (*STEP_PARTS, "other")]
        assert sum(parts) == pytest.approx(metrics["timing_s/step"])
        assert min(parts) >= 0.0
        assert 0.0 <= metrics["rollout/tail_seconds"] <= metrics["timing_s/gen"]
    assert [m["training/epoch"] for m in history] == [0, 0, 1]


def test_reward_time_does_not_count_as_generation_time() -> None:
    class Slow(Scorer):
        async def score_sample(self, sample: Sample) -> Score:
            await anyio.sleep(0.02)
            return await super().score_sample(sample)

    (metrics,), _, _ = train(tiny_backend(), config(num_steps=1), Slow())
    assert metrics["timing_s/reward"] >= 0.02
    assert 0 < metrics["timing_s/gen"] <= metrics["timing_s/step"] - metrics["timing_s/reward"]


def test_a_fixed_baseline_replaces_the_estimator_and_checkpoint_every_is_respected() -> None:
    saved: list[int] = []

    async def save(step: int, stopping: bool, timers: Timers) -> None:
        saved.append(step)

    settings = config(baseline=10.0, num_steps=3, checkpoint_every=2)
    history, _, _ = train(tiny_backend(), settings, save=save)
    # Rewards are far below the baseline, so no advantage was computed relative to a group's mean.
    assert all(m["critic/advantages/max"] < -5 for m in history)
    assert saved == [2, 3]
    with pytest.raises(ConfigError, match="sync_every=0 must be at least 1"):
        config(sync_every=0)


def test_mini_batches_ppo_epochs_and_sync_every() -> None:
    backend = tiny_backend()

    def uids(batch: TrainBatch) -> list[str]:
        # With sync_every=2 the old policy of the loss is the policy that sampled.
        assert batch.old_log_probs is not None
        assert batch.rollout_log_probs is not None
        assert torch.equal(batch.old_log_probs, batch.rollout_log_probs)
        return batch.uids

    steps = observe(backend, uids)
    settings = config(mini_batch_size=2, ppo_epochs=2, sync_every=2, shuffle="seed")
    history, _, served = train(backend, settings)
    assert len(steps) == 3 * 2 * 2
    for first in range(0, len(steps), 2):
        one, other = set(steps[first]), set(steps[first + 1])
        assert len(one) == len(other) == 2
        assert not one & other
    orders = {tuple(steps[i] + steps[i + 1]) for i in (0, 2)}
    assert len(orders) == 2, "both epochs have the same order"
    assert [m["training/policy_version"] for m in history] == [0, 1, 1]
    assert served.stats().version == 1
    assert not any("timing_s/old_log_prob" in m for m in history)


def fail(reason: str) -> Score:
    return Score(0.0, ok=False, failure=reason)


def test_steps_without_usable_samples_are_skipped_and_end_the_run_after_three() -> None:
    backend = tiny_backend()
    before = weights(backend)
    notes: list[str] = []
    log = Log()
    served, data = engine(), buffer()

    async def work() -> None:
        manager = rollouts([served], data, Scorer(lambda sample: fail("judge is gone")))
        await run_rl_training(
            backend, data, manager, [served], config(num_steps=9), log, notify=notes.append
        )

    with pytest.raises(TrainingError, match=r"3 steps in a row .*judge is gone.*on_failure"):
        anyio.run(work)
    backend.close()
    assert [m["training/skipped_batch"] for _, m in log.lines] == [1.0, 1.0]
    assert [m["training/num_failed_rewards"] for _, m in log.lines] == [12.0, 12.0]
    assert all("critic/score/mean" not in m and "actor/lr" not in m for _, m in log.lines)
    assert len(notes) == 3
    assert "no sample to train on" in notes[0]
    assert notes[1] == "warning: step 1: 12 of 12 samples: left out, judge is gone"
    assert "no sample to train on" in notes[2]
    for name, parameter in backend.decoder.named_parameters():
        assert torch.equal(before[name], parameter)


def test_one_step_without_usable_samples_is_skipped_and_the_run_continues() -> None:
    calls = 0

    def second_step_fails(sample: Sample) -> Score:
        nonlocal calls
        calls += 1
        return fail("late") if 12 < calls <= 24 else Score(float(sample.index))

    history, _, _ = train(tiny_backend(), config(num_steps=4), Scorer(second_step_fails))
    assert [m["training/skipped_batch"] for m in history] == [0.0, 1.0, 0.0, 0.0]
    assert [m["training/policy_version"] for m in history] == [1, 2, 3, 4]


def test_a_lone_sample_of_a_group_is_not_trained_on() -> None:
    def only_one(sample: Sample) -> Score:
        alone = sample.group_index is not None and sample.group_index % 4 == 0
        return fail("x") if alone and sample.index else Score(float(sample.index))

    backend = tiny_backend()
    rows = observe(backend, rows_of)
    history, _, _ = train(backend, config(num_steps=1), Scorer(only_one))
    assert rows == [9]
    assert history[0]["training/num_lone_samples"] == 1.0
    assert history[0]["training/num_failed_rewards"] == 2.0


def test_a_reward_error_ends_the_run() -> None:
    def stop(sample: Sample) -> Score:
        raise RewardError("the judge is broken")

    with pytest.raises(RewardError, match="the judge is broken"):
        train(tiny_backend(), config(), Scorer(stop))


class Stuck(SingleProcessBackend):
    """A backend whose forward and backward pass never finishes."""

    def forward_backward(self, *arguments: Any, **more: Any) -> TrainFuture[dict[str, float]]:
        never: Future[dict[str, float]] = Future()
        return TrainFuture(never)


def test_a_stuck_update_raises_a_timeout_error_that_names_the_stage() -> None:
    backend = tiny_backend()
    backend.__class__ = Stuck
    with pytest.raises(StageTimeoutError, match=r"update: the trainer's optimizer step .* 0.1 s"):
        train(backend, config(), deadlines=Deadlines(timeout_s=0.1))


def test_a_blocked_event_loop_is_reported_from_another_thread() -> None:
    messages: list[str] = []
    reported = threading.Event()

    def on_stuck(message: str) -> None:
        messages.append(message)
        reported.set()

    async def work() -> None:
        deadlines = Deadlines(timeout_s=0.01, grace_s=0.02, on_stuck=on_stuck)
        async with deadlines.stage("checkpoint", "the disk"):
            assert reported.wait(10), "on_stuck was not called"

    anyio.run(work)
    assert messages == [
        "checkpoint: the disk was not done after 0.01 s; raise trainer.stage_timeout_s if it only "
        "needs more time"
    ]


def test_a_stage_within_its_deadline_is_not_reported() -> None:
    messages: list[str] = []

    async def work() -> None:
        deadlines = Deadlines(timeout_s=0.02, grace_s=0.01, on_stuck=messages.append)
        async with deadlines.stage("fast", "nothing"):
            pass
        await anyio.sleep(0.06)

    anyio.run(work)
    assert messages == []


def test_a_step_is_saved_after_logging_and_after_step_can_stop_the_run() -> None:
    log_lengths: list[tuple[int, bool, int]] = []
    data, served, log, backend = buffer(), engine(), Log(), tiny_backend()

    async def after_step(
        step: int, groups: Sequence[Group], metrics: dict[str, float], timers: Timers
    ) -> bool:
        assert len(groups) == 4
        metrics["timing_s/testing"] = 0.5
        return step == 4

    async def save(step: int, stopping: bool, timers: Timers) -> None:
        log_lengths.append((step, stopping, len(log.lines)))

    async def work() -> list[dict[str, float]]:
        return await run_rl_training(
            backend,
            data,
            rollouts([served], data),
            [served],
            config(num_steps=9, start_step=2),
            log,
            after_step=after_step,
            save=save,
        )

    history = anyio.run(work)
    backend.close()
    assert log_lengths == [(3, False, 1), (4, True, 2)]
    assert [m["training/global_step"] for m in history] == [3, 4]
    assert log.lines[0][1]["timing_s/testing"] == 0.5


class Receiver:
    """Receives weight updates like an engine."""

    def __init__(self) -> None:
        self.version = -1
        self.names: list[str] = []

    async def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.version
        self.names = [name for name, _ in update.tensors()]


class RecordingDrafter:
    """A `DrafterTraining` that records its calls."""

    sink = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin(self) -> None:
        self.calls.append("begin")

    @asynccontextmanager
    async def rollout(self, step: int) -> AsyncIterator[None]:
        self.calls.append(f"rollout {step}")
        yield
        self.calls.append(f"generated {step}")

    def begin_step(self, step: int, version: int) -> None:
        self.calls.append(f"update {step} of {version}")

    async def after_step(self, step: int, version: int) -> dict[str, float]:
        self.calls.append(f"after {step} with {version}")
        return {}


def test_drafter_training_is_called_before_and_after_each_part_of_a_step() -> None:
    drafter = RecordingDrafter()
    train(tiny_backend(), config(num_steps=2), drafter=drafter)
    steps = [
        [f"rollout {n}", f"generated {n}", f"update {n} of {n - 1}", f"after {n} with {n}"]
        for n in (1, 2)
    ]
    assert drafter.calls == ["begin", *steps[0], *steps[1]]


def test_all_engines_receive_all_weights_with_the_same_version() -> None:
    backend = tiny_backend()
    receivers = [Receiver(), Receiver(), Receiver()]

    async def work() -> None:
        await publish(backend, receivers)

    anyio.run(work)
    backend.close()
    names = [name for name, _ in backend.decoder.named_parameters()]
    assert [r.names for r in receivers] == [names] * 3
    assert [r.version for r in receivers] == [1, 1, 1]


FLAT = {"critic/score/min": 0.0, "critic/score/max": 0.0}


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        (FLAT, "scores every answer as wrong"),
        ({**FLAT, "response_length/clip_ratio": 0.9}, "raise data.max_response_length"),
        ({**FLAT, "training/num_failed_rewards": 2.0}, "the reward function fails"),
        ({"critic/score/min": 1.0, "critic/score/max": 1.0}, "too easy"),
    ],
)
def test_equal_rewards_cause_one_warning_with_the_likely_reason(
    metrics: dict[str, float], cause: str
) -> None:
    messages: list[str] = []
    watch = FlatRewardWatch(3, messages.append)
    varied = {"critic/score/min": 0.0, "critic/score/max": 1.0}
    for step, seen in enumerate(
        [metrics, metrics, varied, {}, *[metrics] * 9, varied, *[metrics] * 5]
    ):
        watch.see(step, seen)
        assert len(messages) == int(step >= 6)
    assert messages[0].startswith("warning: step 6: ")
    assert cause in messages[0]


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("KeyError: 'a'", "slipstream reward RUN/rollouts/1.jsonl"), (f"set {PRIME}", PRIME)],
)
def test_a_run_without_scores_ends_with_a_remedy_that_helps(reason: str, remedy: str) -> None:
    """`slipstream reward` runs in the main thread, so it does not show failures of threads."""
    sample = Sample(uid="a", status=Status.FAILED, failure=reason)
    group = Group(index=0, prompt=Prompt(uid="a", ids=[1]), samples=[sample])
    watch = FailureWatch(lambda text: None)
    watch.see(1, [group])
    with pytest.raises(TrainingError) as caught:
        watch.check(1, last=True)
    assert remedy in str(caught.value)
    assert ("slipstream reward" in str(caught.value)) == (remedy != PRIME)


@pytest.mark.parametrize(("failed", "ends"), [([2, 2, 2], False), ([2, 3, 2], True)])
def test_a_run_ends_if_too_many_samples_of_three_steps_failed(
    failed: list[int], ends: bool
) -> None:
    watch = FailureWatch(lambda text: None, most=0.5)
    for step, count in enumerate(failed, 1):
        states = [Status.FAILED] * count + [Status.COMPLETED] * (4 - count)
        samples = [Sample(status=status, failure="tool server down") for status in states]
        prompt = Prompt(uid="a", ids=[1])
        watch.see(step, [Group(index=0, prompt=prompt, samples=samples)])
        if step < 3:
            watch.check(step, last=False)
    if not ends:
        watch.check(3, last=False)
        return
    with pytest.raises(TrainingError, match="7 of 12 samples") as caught:
        watch.check(3, last=False)
    assert "max_failed_share" in str(caught.value)
    assert "tool server down" in str(caught.value)


def test_failures_of_the_reward_function_do_not_end_a_run() -> None:
    watch = FailureWatch(lambda text: None, most=0.5)
    for step in range(1, 4):
        samples = [Sample(status=Status.COMPLETED) for _ in range(4)]
        for sample in samples[1:]:
            apply_score(sample, Score(0.0, ok=False, failure="broken"))
        watch.see(step, [Group(index=0, prompt=Prompt(uid="a", ids=[1]), samples=samples)])
        watch.check(step, last=False)
