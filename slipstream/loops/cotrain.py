"""Co-training of the draft head in the RL loop: a slice of training every few steps.

    collect rows of the last steps -> train -> check on held-out responses -> publish to the engines

Owns when and where; what a slice is, `drafter.cotraining` knows. Made by `loops.build_cotrain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from slipstream.checkpoint.tree import load_tree
from slipstream.drafter.cotraining import CoTraining, Slice
from slipstream.drafter.sequences import PolicyEnds
from slipstream.loops.snapshot import cotraining_file
from slipstream.loops.stages import Stages
from slipstream.models.decoder import Decoder
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, UpdateKind, WeightUpdate


class DraftReceiver(Protocol):
    """What co-training needs of an engine."""

    async def update_drafter(self, update: WeightUpdate) -> None: ...


class IntervalTraining:
    """`DrafterTraining` after every `interval`-th RL step, on the trainer's own compute thread."""

    def __init__(
        self,
        training: CoTraining,
        policy: Decoder,
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        interval: int,
        dtype: torch.dtype,
        notify: Callable[[str], None],
        stages: Stages,
    ) -> None:
        """`policy` is the trainer's own, and computes in `dtype`."""
        self.training = training
        self._policy = policy
        self._engines = engines
        self._compute = compute
        self._interval = interval
        self._dtype = dtype
        self._notify = notify
        self._stages = stages
        self._said = False

    @property
    def sink(self) -> FeatureSink:
        """See `DrafterTraining`."""
        return self.training.collector

    def begin_step(self, step: int) -> None:
        """See `DrafterTraining`. Nothing is kept that would be too old when it is trained on."""
        lookback = self.training.collector.buffer.settings.lookback_steps
        wanted = -step % self._interval < lookback
        self.training.collector.begin_step(step, wanted=wanted)

    async def after_step(self, step: int) -> dict[str, float]:
        """See `DrafterTraining`."""
        if step % self._interval:
            return self.training.counts()
        async with self._stages.stage("draft head", "a slice of its training"):
            done = await self._compute.submit(lambda: self._slice(step))
        if done.failure is not None:
            self._notify(
                f"step {step}: training of the draft head failed and begins anew from the one in "
                f"use, which stays: {done.failure}"
            )
        if done.adopted:
            await self._publish()
        elif done.held_back and not self._said:
            self._said = True
            measured = "drafter/acceptance_rate" in done.metrics
            why = "it accepts less on held-out responses" if measured else "none were held out yet"
            self._notify(
                f"step {step}: the trained draft head is held back, {why}; the one in use stays. "
                "Said once, drafter/hold_backs counts"
            )
        return done.metrics

    async def restore(self, checkpoint: Path) -> None:
        """Go on from an RL checkpoint; the engines get the head that was in use. Without
        co-training in it, begin with the head that there is."""
        file = cotraining_file(checkpoint)
        if not file.exists():
            self._notify(f"{checkpoint} was made without co-training, which begins anew")
            return
        await self._compute.submit(lambda: self.training.load_state_dict(load_tree(file)))
        await self._publish()

    def _slice(self, step: int) -> Slice:
        return self.training.slice(PolicyEnds.of(self._policy, self._dtype), step=step)

    async def _publish(self) -> None:
        for engine in self._engines:
            update = WeightUpdate(
                version=self.training.version,
                kind=UpdateKind.DRAFT,
                buckets=[self.training.published()],
            )
            await engine.update_drafter(update)
