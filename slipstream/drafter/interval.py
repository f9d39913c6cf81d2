"""Co-training of the draft head in the RL loop: when and where.

    collect rows of the last steps -> train -> check on held-out responses -> publish to the engines

`IntervalTraining` trains between RL steps, on the trainer's thread. `drafter.opportunistic` trains
in a separate process whenever a core is idle. Both run slices of training that `drafter.cotraining`
defines. Made by `build.cotraining`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.checkpoint.layout import cotraining_file
from slipstream.checkpoint.state import draft_folder
from slipstream.checkpoint.tree import load_tree, tree_writer
from slipstream.deadlines import Deadlines
from slipstream.drafter.cotraining import CoTraining, Slice
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.sequences import PolicyEnds
from slipstream.models.draft.files import save_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, PolicyVersion, UpdateKind, WeightUpdate


class DraftReceiver(Protocol):
    """What co-training needs of an engine."""

    async def update_drafter(self, update: WeightUpdate) -> None: ...


class IntervalTraining:
    """`DrafterTraining` after every `interval`-th RL step, on the trainer's own compute thread."""

    def __init__(
        self,
        training: CoTraining,
        ends: Callable[[], PolicyEnds],
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        interval: int,
        notify: Callable[[str], None],
        deadlines: Deadlines,
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """`ends` copies those of the policy as it is, on `compute`; `decoded` is the
        collector's."""
        self.training = training
        self.decoded = decoded
        self._ends = ends
        self._engines = engines
        self._compute = compute
        self._interval = interval
        self._notify = notify
        self._deadlines = deadlines
        self._said = False

    @property
    def sink(self) -> FeatureSink:
        """See `DrafterTraining`."""
        return self.training.collector

    async def begin(self) -> None:
        """See `DrafterTraining`."""

    @asynccontextmanager
    async def rollout(self, step: int) -> AsyncIterator[None]:
        """See `DrafterTraining`."""
        if self.decoded is not None:
            self.decoded.begin(wanted=self._wants(step))
        yield

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """See `DrafterTraining`."""
        self.training.collector.begin_step(step, version, wanted=self._wants(step))

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """See `DrafterTraining`."""
        metrics = taken(self.decoded)
        if step % self._interval:
            metrics |= self.training.counts()
        else:
            metrics |= await self._train(step)
        return metrics | staleness(self.training.trained_to, version)

    def _wants(self, step: int) -> bool:
        """Nothing is kept that would be too old when it is trained on."""
        return -step % self._interval < self.training.collector.buffer.settings.lookback_steps

    async def _train(self, step: int) -> dict[str, float]:
        async with self._deadlines.stage("draft head", "a slice of its training"):
            done = await self._compute.submit(lambda: self._slice(step))
        if done.failure is not None:
            self._notify(failed(step, done.failure))
        if done.adopted:
            await self._publish()
        elif done.held_back and not self._said:
            self._said = True
            measured = "drafter/acceptance_rate" in done.metrics
            why = "none were held out yet"
            if measured:
                why = "it accepts less on held-out responses, by more than chance"
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
        state = load_tree(file)
        if "trainer" in state:
            await self._compute.submit(lambda: self.training.load_state_dict(state))
        else:
            self._notify(
                f"{checkpoint} has a draft head that a process beside the run trained; "
                "its optimizer begins anew"
            )
            await self._compute.submit(
                lambda: self.training.begin_with(
                    state["used"], int(state["version"]), state["trained_to"]
                )
            )
        await self._publish()

    def snapshot(self) -> Callable[[Path], None]:
        """See `SavesItself`: the head in use, and all that a bitwise equal continuation needs."""
        training = self.training
        return self._compute.run(lambda: head_writer(training.used, training.state_dict()))

    def _slice(self, step: int) -> Slice:
        return self.training.slice(self._ends(), step=step)

    async def _publish(self) -> None:
        # Not here: torch would start a second team of threads, which fights with that of the
        # compute thread for the cores for the rest of the run.
        weights = dict(await self._compute.submit(self.training.published))
        await publish_head(self._engines, self.training.version, weights)


def head_writer(like: DraftModel, state: Mapping[str, Any]) -> Callable[[Path], None]:
    """Writes the head in use, one `like` this, as `slipstream draft` does, and `state` beside it.
    Whatever torch has to do for it is done now."""
    with torch.device("meta"):
        used = like.blank()
    used.load_state_dict(state["used"], assign=True)
    write_state = tree_writer(dict(state))

    def write(checkpoint: Path) -> None:
        save_draft_head(used, draft_folder(checkpoint))
        write_state(cotraining_file(checkpoint))

    return write


async def publish_head(
    engines: Sequence[DraftReceiver], version: int, weights: Mapping[str, Tensor]
) -> None:
    """Give every engine the head, between two of its steps."""
    for engine in engines:
        update = WeightUpdate(
            version=version, kind=UpdateKind.DRAFT, buckets=[list(weights.items())]
        )
        await engine.update_drafter(update)


def taken(decoded: DecodedFeatures | None) -> dict[str, float]:
    """How many rows of the step came from the engine, whose features are then no longer wanted."""
    if decoded is None:
        return {}
    metrics = {"drafter/decoded_samples": float(decoded.taken)}
    decoded.begin(wanted=False)
    return metrics


def staleness(trained_to: PolicyVersion | None, version: PolicyVersion) -> dict[str, float]:
    """How far the policy is ahead of the newest responses that the head in use has learned from."""
    return {} if trained_to is None else {"drafter/staleness_versions": float(version - trained_to)}


def failed(step: int, failure: str) -> str:
    """What is said of a slice that failed."""
    return (
        f"step {step}: training of the draft head failed and begins anew from the one in use, "
        f"which stays: {failure}"
    )
