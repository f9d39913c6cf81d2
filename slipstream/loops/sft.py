"""The SFT loop: batch, forward and backward pass, optimizer step, log.

The loop is pure: `run.phases` calls it with objects from `build`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

from slipstream.checkpoint.saved import REMEDY, Saved, drawn_from, is_same, restoring
from slipstream.deadlines import Deadlines
from slipstream.errors import ConfigError, DataError, check_at_least_one
from slipstream.loops.steps import checkpoint_due
from slipstream.metrics.loggers import MetricsLogger
from slipstream.reading import shown
from slipstream.rollout.train_rows import rows_of
from slipstream.training.losses import sft_loss
from slipstream.training.protocol import TrainingBackend
from slipstream.types import Sample, TrainBatch

AfterStep = Callable[[int, dict[str, float]], Awaitable[bool]]
"""Called after each step, before its metrics are logged. May add metrics. True ends the loop."""

Save = Callable[[int, bool], Awaitable[None]]
"""Called after a step's metrics were logged, with the step and whether the loop ends with it."""

_MAX_UNUSED = 1000
"""After this many samples in a row without a token to train on, the loop raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTTrainingConfig:
    """One optimizer step uses `batch_size` samples, or samples with at least `batch_tokens` tokens.

    `start_step` is the number of steps already done (resume). The loop calls `save` every
    `checkpoint_every` steps and at the end. Raises ConfigError unless exactly one size is given.
    """

    num_steps: int
    batch_size: int | None = None
    batch_tokens: int | None = None
    start_step: int = 0
    log_every: int = 1
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ConfigError(
                f"batch_size={self.batch_size} and batch_tokens={self.batch_tokens}: set exactly "
                "one of the two"
            )
        check_at_least_one(self, "batch_size", "batch_tokens", "log_every", "checkpoint_every")


class SampleStream(Protocol):
    """An endless sequence of training samples whose position can be saved and restored."""

    def next_sample(self) -> Sample: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ShuffledSamples:
    """A `SampleStream` that repeats a list, each epoch in a different seeded order."""

    def __init__(self, samples: Sequence[Sample], *, seed: int | str) -> None:
        if not samples:
            raise DataError("there are no SFT samples; check sft.train_files")
        self._samples = samples
        self._seed = seed
        self._epoch = 0
        self._offset = 0
        self._order = self._shuffled()
        digest = hashlib.blake2b(digest_size=8)
        for sample in samples:
            # Not the sample's views, which stay: a data set would take twice its memory.
            tokens = [t for segment in sample.segments for t in segment.ids]
            loss_mask = [m for segment in sample.segments for m in segment.loss_mask]
            digest.update(f"{tokens}\x1f{loss_mask}\x1e".encode())
        self._content = digest.hexdigest()

    @property
    def drawn(self) -> int:
        """The number of samples drawn since the start of the run."""
        return self._epoch * len(self._samples) + self._offset

    def next_sample(self) -> Sample:
        if self._offset == len(self._samples):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._shuffled()
        self._offset += 1
        return self._samples[self._order[self._offset - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "count": len(self._samples),
            "content": self._content,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, error=DataError).fields("epoch", "offset", "count", "content")
        if saved["count"].count() != len(self._samples):
            raise DataError(
                f"the checkpoint was made with {state['count']} SFT samples, now there are "
                f"{len(self._samples)}; resume with the same files"
            )
        if saved["content"].text() != self._content:
            raise DataError(
                "the checkpoint was made with other SFT samples, or with another tokenizer or chat "
                "template; resume with the same files"
            )
        epoch = saved["epoch"].count()
        self._offset = saved["offset"].count(len(self._samples))
        self._epoch = epoch
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(f"sft/{self._seed}/{self._epoch}").shuffle(order)
        return order


class MixedSamples:
    """A `SampleStream` that draws each sample from one of several streams, with given weights.

    The choice of the stream depends only on the seed and the number of earlier draws.
    """

    def __init__(self, parts: Sequence[tuple[SampleStream, float]], *, seed: int) -> None:
        if not parts:
            raise DataError("a mixture needs at least one stream of samples, got none")
        self._streams = [stream for stream, _ in parts]
        self._weights = [weight for _, weight in parts]
        self._seed = seed
        self._drawn = 0

    @property
    def drawn(self) -> int:
        return self._drawn

    def next_sample(self) -> Sample:
        draw = random.Random(f"sft-mixture/{self._seed}/{self._drawn}")
        self._drawn += 1
        (stream,) = draw.choices(self._streams, weights=self._weights)
        return stream.next_sample()

    def state_dict(self) -> dict[str, Any]:
        streams = [stream.state_dict() for stream in self._streams]
        return {"drawn": self._drawn, "weights": self._weights, "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not is_same(state.get("weights"), self._weights):
            raise DataError(
                f"the checkpoint was made with sft.mixture_weights={shown(state.get('weights'))}, "
                f"now they are {self._weights}; resume with the same mixture"
            )
        saved = Saved(state, error=DataError).fields("drawn", "weights", "streams")
        drawn = saved["drawn"].count()
        streams = saved["streams"].elements(len(self._streams))
        for stream, position in zip(self._streams, streams, strict=True):
            with restoring(position.place):
                stream.load_state_dict(position.value)
        parts = [drawn_from(stream) for stream in self._streams]
        known = [count for count in parts if count is not None]
        if len(known) == len(parts) and sum(known) != drawn:
            raise DataError(f"drawn is {drawn}, but the streams are at {parts}; {REMEDY}")
        self._drawn = drawn


async def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Sample] | SampleStream,
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    after_step: AfterStep | None = None,
    save: Save | None = None,
    seed: int = 0,
    deadlines: Deadlines | None = None,
) -> list[dict[str, float]]:
    """Train on demonstrations and return the metrics of every step.

    `seed` sets the order if `samples` is a list. Raises StageTimeoutError if a stage exceeds its
    deadline, DataError if the samples have no tokens to train on, and the backend's errors.
    """
    stream = ShuffledSamples(samples, seed=seed) if isinstance(samples, Sequence) else samples
    deadlines = deadlines or Deadlines()
    loss = sft_loss()
    history: list[dict[str, float]] = []
    for step in range(config.start_step + 1, config.num_steps + 1):
        started = time.perf_counter()
        batch = next_batch(stream, samples=config.batch_size, tokens=config.batch_tokens)
        async with deadlines.stage("update", "the trainer's optimizer step"):
            metrics = dict(await backend.forward_backward(batch, loss))
            metrics |= await backend.optim_step()
        seconds = time.perf_counter() - started
        metrics |= {
            "sft/tokens": batch.num_target_tokens,
            "sft/tokens_per_second": batch.num_tokens / seconds,
            "training/global_step": step,
            "timing_s/step": seconds,
        }
        done = await after_step(step, metrics) if after_step is not None else False
        history.append(metrics)
        if metrics_logger is not None and (step % config.log_every == 0 or done):
            metrics_logger.log(step, metrics)
        if save is not None and (done or checkpoint_due(step, config)):
            await save(step, done)
        if done:
            break
    return history


def next_batch(
    stream: SampleStream, *, samples: int | None = None, tokens: int | None = None
) -> TrainBatch:
    """The next batch: `samples` samples, or samples until `tokens` tokens are reached.

    Samples without a token to train on are skipped.
    """
    chosen: list[Sample] = []
    count = unused = 0
    while (samples is None or len(chosen) < samples) and (tokens is None or count < tokens):
        sample = stream.next_sample()
        if _has_target(sample):
            chosen.append(sample)
            count += sample.num_tokens
            unused = 0
        else:
            unused += 1
        if unused == _MAX_UNUSED:
            raise DataError(
                f"{unused} SFT samples in a row have no token to train on (the last one: "
                f"{sample.uid!r}); check that the conversations have assistant turns"
            )
    return rows_of(chosen)


def _has_target(sample: Sample) -> bool:
    weights = chain.from_iterable(segment.loss_mask for segment in sample.segments)
    return any(islice(weights, 1, None))
