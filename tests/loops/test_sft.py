"""Tests of the SFT loop and of the order of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, DataError
from slipstream.loops.sft import (
    MixedSamples,
    SampleStream,
    SFTTrainingConfig,
    ShuffledSamples,
    next_batch,
    run_sft_training,
)
from slipstream.metrics.names import check_names
from slipstream.types import Sample, Segment
from tests.training.helpers import tiny_backend


def demonstration(name: str, length: int = 6, *, loss: float = 1.0) -> Sample:
    made = Sample(uid=name)
    made.append(Segment.given("user", [1, 2]))
    made.append(Segment.given("assistant", list(range(3, 1 + length)), loss=loss))
    return made


def samples(count: int = 5, prefix: str = "s") -> list[Sample]:
    return [demonstration(f"{prefix}{i}") for i in range(count)]


def uids(stream: SampleStream, count: int) -> list[str]:
    return [stream.next_sample().uid for _ in range(count)]


def test_the_loss_decreases_and_all_metric_names_are_known() -> None:
    backend = tiny_backend(metrics_prefix="sft")
    config = SFTTrainingConfig(num_steps=8, batch_tokens=20)
    logged: list[tuple[int, dict[str, float]]] = []

    class Log:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            check_names(metrics)
            logged.append((step, dict(metrics)))

        def close(self) -> None:
            pass

    async def work() -> list[dict[str, float]]:
        return await run_sft_training(backend, samples(), config, Log())

    history = anyio.run(work)
    backend.close()
    assert [step for step, _ in logged] == list(range(1, 9))
    assert history[-1]["sft/loss"] < history[0]["sft/loss"]
    # A batch ends with the sample that reaches 20 tokens: four samples of six tokens, each with
    # four target tokens.
    assert {m["sft/tokens"] for m in history} == {16.0}


def test_batch_size_counts_samples_and_checkpoint_every_is_respected() -> None:
    backend = tiny_backend(metrics_prefix="sft")
    saved: list[tuple[int, bool]] = []

    async def save(step: int, stopping: bool) -> None:
        saved.append((step, stopping))

    async def work(config: SFTTrainingConfig) -> list[dict[str, float]]:
        return await run_sft_training(backend, samples(), config, save=save)

    history = anyio.run(work, SFTTrainingConfig(num_steps=7, batch_size=3, checkpoint_every=3))
    backend.close()
    assert {m["sft/tokens"] for m in history} == {12.0}
    assert saved == [(3, False), (6, False), (7, False)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set exactly one of the two"),
        ({"batch_size": 2, "batch_tokens": 2}, "set exactly one of the two"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_tokens": 8, "checkpoint_every": 0}, "checkpoint_every=0 must be at least 1"),
    ],
)
def test_invalid_sft_settings_are_errors(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTTrainingConfig(num_steps=1, **settings)


def test_a_step_is_saved_after_logging_and_after_step_can_stop_the_run() -> None:
    backend = tiny_backend(metrics_prefix="sft")
    events: list[str] = []

    async def after_step(step: int, metrics: dict[str, float]) -> bool:
        events.append(f"step {step}")
        return step == 4

    async def save(step: int, stopping: bool) -> None:
        events.append(f"save {step} {stopping}")

    class Log:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            events.append(f"log {step}")

        def close(self) -> None:
            pass

    async def work() -> list[dict[str, float]]:
        config = SFTTrainingConfig(num_steps=9, batch_tokens=6, start_step=2)
        return await run_sft_training(
            backend, samples(), config, Log(), after_step=after_step, save=save
        )

    assert len(anyio.run(work)) == 2
    backend.close()
    assert events == ["step 3", "log 3", "save 3 False", "step 4", "log 4", "save 4 True"]


def test_each_epoch_is_a_different_permutation_of_all_samples() -> None:
    stream = ShuffledSamples(samples(9), seed=4)
    first, second = uids(stream, 9), uids(stream, 9)
    assert sorted(first) == sorted(second) == sorted(s.uid for s in samples(9))
    assert first != second
    assert uids(ShuffledSamples(samples(9), seed=4), 18) == first + second
    assert uids(ShuffledSamples(samples(9), seed=5), 9) != first


@pytest.mark.parametrize("taken", [0, 3, 5, 7, 10])
def test_the_position_in_the_data_is_restored_exactly(taken: int) -> None:
    def mixed() -> MixedSamples:
        parts: list[tuple[SampleStream, float]] = [
            (ShuffledSamples(samples(3, "a"), seed="1/0"), 3.0),
            (ShuffledSamples(samples(4, "b"), seed="1/1"), 1.0),
        ]
        return MixedSamples(parts, seed=1)

    for make in (lambda: ShuffledSamples(samples(), seed=1), mixed):
        stream, restored = make(), make()
        uids(stream, taken)
        restored.load_state_dict(stream.state_dict())
        assert uids(restored, 12) == uids(stream, 12)


def test_a_mixture_samples_by_its_weights() -> None:
    stream = MixedSamples(
        [
            (ShuffledSamples(samples(3, "a"), seed=1), 3.0),
            (ShuffledSamples(samples(3, "b"), seed=1), 1.0),
        ],
        seed=1,
    )
    counts = Counter(uid[0] for uid in uids(stream, 2000))
    # The expected count is 1500, with a standard deviation of 19.
    assert 1420 < counts["a"] < 1580


def test_a_state_of_other_data_or_weights_is_an_error() -> None:
    stream = ShuffledSamples(samples(5), seed=1)
    with pytest.raises(DataError, match="made with 4 SFT samples, now there are 5"):
        stream.load_state_dict(ShuffledSamples(samples(4), seed=1).state_dict())
    mixed = MixedSamples([(stream, 1.0)], seed=1)
    state: dict[str, Any] = {**mixed.state_dict(), "weights": [2.0]}
    with pytest.raises(DataError, match=r"sft.mixture_weights=\[2.0\]"):
        mixed.load_state_dict(state)


def test_data_without_samples_or_without_target_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match="check sft"):
        ShuffledSamples([], seed=1)
    unlabeled = ShuffledSamples([demonstration("unlabeled", loss=0.0)], seed=1)
    with pytest.raises(DataError, match=r"no token to train on .*'unlabeled'"):
        next_batch(unlabeled, tokens=10)
    some = ShuffledSamples([demonstration("unlabeled", loss=0.0), demonstration("s")], seed=1)
    assert set(next_batch(some, tokens=30).uids) == {"s"}


def test_a_state_of_other_samples_is_an_error() -> None:
    state = ShuffledSamples(samples(4), seed=1).state_dict()
    ShuffledSamples(samples(4), seed=1).load_state_dict(state)
    longer = [demonstration("s0", 7), *samples(4)[1:]]
    for other, message in ((samples(5), "with 4 SFT samples"), (longer, "other SFT samples")):
        with pytest.raises(DataError, match=message):
            ShuffledSamples(other, seed=1).load_state_dict(state)
