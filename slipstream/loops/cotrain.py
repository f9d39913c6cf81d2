"""Co-training of the draft head in the RL loop: when and where.

    collect rows of the last steps -> train -> check on held-out responses -> publish to the engines

`IntervalTraining` trains between RL steps, in the trainer's own time; `OpportunisticTraining` lets
a process beside the run do it whenever a core is idle. What a slice of training is, both leave to
`drafter.cotraining`. Made by `loops.build_cotrain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.checkpoint.state import draft_folder
from slipstream.checkpoint.tree import load_tree, tree_writer
from slipstream.drafter.buffer import Kept
from slipstream.drafter.collector import FeatureForwarder
from slipstream.drafter.cotraining import CoTraining, Slice
from slipstream.drafter.sequences import PolicyEnds
from slipstream.drafter.worker import DraftWorker, Learned, WorkerSetup
from slipstream.errors import TrainingError
from slipstream.loops.snapshot import cotraining_file
from slipstream.loops.stages import Stages, run_in_daemon
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.draft_head import DraftHead
from slipstream.models.draft_io import save_draft_head
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, UpdateKind, WeightUpdate

_PATIENT = 10
"""RL steps after which it is said that no core has been lent."""


class DraftReceiver(Protocol):
    """What co-training needs of an engine."""

    async def update_drafter(self, update: WeightUpdate) -> None: ...


class CoreLender(Protocol):
    """An engine that decodes the last responses on one thread."""

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """See `EmbeddedEngine`."""
        ...


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
            self._notify(_failed(step, done.failure))
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
                lambda: self.training.begin_with(state["used"], int(state["version"]))
            )
        await self._publish()

    def snapshot(self) -> Callable[[Path], None]:
        """See `SavesItself`: the head in use, and all that a bitwise equal continuation needs."""
        training = self.training
        return self._compute.run(lambda: _writer(training.used.config, training.state_dict()))

    def _slice(self, step: int) -> Slice:
        return self.training.slice(PolicyEnds.of(self._policy, self._dtype), step=step)

    async def _publish(self) -> None:
        # Not here: torch would start a second team of threads, which fights with that of the
        # compute thread for the cores for the rest of the run.
        weights = dict(await self._compute.submit(self.training.published))
        await _publish(self._engines, self.training.version, weights)


class OpportunisticTraining:
    """`DrafterTraining` by a process that runs only while a core is idle.

    It is given the rows of every step, trains until there is nothing left in them or the next
    update begins, and its heads are published after the step in which they arrive. When it ends by
    itself or is killed, the run says so and starts another one from the head in use. Where there
    are lenders, for the run computes on all cores, it stands still (stopped by signal) but while
    one lends a core.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        policy: Decoder,
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        dtype: torch.dtype,
        lenders: Sequence[CoreLender] = (),
        notify: Callable[[str], None],
        stages: Stages,
    ) -> None:
        """`policy` is the trainer's own, and computes in `dtype`."""
        self._setup = setup
        self._lenders, self._lent_now, self._times_lent, self._said = lenders, 0, 0, False
        for lender in lenders:
            lender.lend_to(self._lent)
        self._policy = policy
        self._engines = engines
        self._compute = compute
        self._dtype = dtype
        self._notify = notify
        self._stages = stages
        self._forwarder = FeatureForwarder(setup.collector)
        self._worker: DraftWorker | None = None
        self._restarts = self._hold_backs = self._failures = 0
        self._seconds = 0.0
        self.training = HeadInUse(setup)

    @property
    def sink(self) -> FeatureSink:
        """See `DrafterTraining`."""
        return self._forwarder

    def begin_step(self, step: int) -> None:
        """See `DrafterTraining`. The update needs all cores."""
        self._forwarder.begin_step(step)
        if self._worker is not None:
            try:
                self._worker.stop()
            except TrainingError as error:
                self._lost(self._worker, error)

    async def after_step(self, step: int) -> dict[str, float]:
        """See `DrafterTraining`."""
        metrics = await self._receive()
        if self._lenders and not self._times_lent and step >= _PATIENT and not self._said:
            self._said = True
            self._notify(
                f"step {step}: the draft head has had no time to learn yet: no rollout has ended "
                "with so few responses that a core was free; raise "
                "actor_rollout_ref.rollout.one_thread_below, or set "
                "speculative.train.mode=interval"
            )
        ends = await self._compute.submit(lambda: PolicyEnds.of(self._policy, self._dtype))
        kept = self._forwarder.take()
        async with self._stages.stage("draft head", "handing rows to the process that trains it"):
            await run_in_daemon(lambda: self._hand_on(kept, ends, step))
        return metrics | {
            "drafter/version": self.training.version,
            "drafter/publishes": self.training.version,
            "drafter/hold_backs": self._hold_backs,
            "drafter/failed_slices": self._failures,
            "drafter/restarts": self._restarts,
            "drafter/cpu_seconds": self._seconds,
        }

    async def restore(self, checkpoint: Path) -> None:
        """Go on with the head that was in use, and a new optimizer; the engines get it, too."""
        file = cotraining_file(checkpoint)
        if not file.exists():
            self._notify(f"{checkpoint} was made without co-training, which begins anew")
            return
        self.training.load_state_dict(load_tree(file))
        await _publish(self._engines, self.training.version, self.training.weights)

    def snapshot(self) -> Callable[[Path], None]:
        """See `SavesItself`: the head in use. What else training knows is given up with its
        process."""
        training = self.training
        return self._compute.run(lambda: _writer(training.setup.config, training.state_dict()))

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    async def _receive(self) -> dict[str, float]:
        """Publish what was learned since; the metrics of the last slice that learned anything."""
        metrics: dict[str, float] = {}
        for learned in self._results():
            self._seconds += learned.cpu_seconds
            self._hold_backs += learned.held_back
            if learned.failure is not None:
                self._failures += 1
                self._notify(_failed(learned.step, learned.failure))
            if learned.weights is not None:
                self.training.take(learned.version, learned.weights)
            if "drafter/loss" in learned.metrics:
                metrics = learned.metrics
        if self.training.fresh:
            await _publish(self._engines, self.training.version, self.training.weights)
            self.training.fresh = False
        return metrics

    def _lent(self, free: bool) -> None:
        """An engine lends a core, or takes it back; called on its compute thread."""
        self._lent_now += 1 if free else -1
        self._times_lent += free
        worker = self._worker
        if worker is not None:
            worker.go_on(self._lent_now > 0)

    def _results(self) -> list[Learned]:
        if self._worker is None:
            return []
        try:
            return self._worker.results()
        except TrainingError as error:
            self._lost(self._worker, error)
            return []

    def _hand_on(self, kept: Sequence[Kept], ends: PolicyEnds, step: int) -> None:
        if self._worker is None:
            # There, for the process ends with the thread that starts it.
            self._worker = self._compute.run(lambda: DraftWorker(self.training.setup))
        try:
            self._worker.learn(kept, ends, step)
        except TrainingError as error:
            self._lost(self._worker, error)

    def _lost(self, worker: DraftWorker, error: TrainingError) -> None:
        # First: engines lend and take back from another thread.
        self._worker = None
        worker.close()
        self._restarts += 1
        self._notify(f"{error}; another one begins from the head in use, and the run goes on")


class HeadInUse:
    """The head that engines have, where another process trains: what a checkpoint keeps of it."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self.fresh = False
        """Whether the engines have yet to get it."""

    @property
    def setup(self) -> WorkerSetup:
        """What a process that begins now begins with."""
        return self._setup

    @property
    def version(self) -> int:
        return self._setup.version

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._setup.weights

    def take(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """A new version of it."""
        self._setup = replace(self._setup, version=version, weights=dict(weights))
        self.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Head and version."""
        return {"used": dict(self.weights), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, or from that of `CoTraining`."""
        self.take(int(state["version"]), state["used"])
        self.fresh = False


def _writer(config: ModelConfig, state: Mapping[str, Any]) -> Callable[[Path], None]:
    """Writes the head in use as `slipstream draft` does, and `state` beside it. Whatever torch has
    to do for it is done now."""
    with torch.device("meta"):
        used = DraftHead(config)
    used.load_state_dict(state["used"], assign=True)
    write_state = tree_writer(dict(state))

    def write(checkpoint: Path) -> None:
        save_draft_head(used, draft_folder(checkpoint))
        write_state(cotraining_file(checkpoint))

    return write


async def _publish(
    engines: Sequence[DraftReceiver], version: int, weights: Mapping[str, Tensor]
) -> None:
    for engine in engines:
        update = WeightUpdate(
            version=version, kind=UpdateKind.DRAFT, buckets=[list(weights.items())]
        )
        await engine.update_drafter(update)


def _failed(step: int, failure: str) -> str:
    return (
        f"step {step}: training of the draft head failed and begins anew from the one in use, "
        f"which stays: {failure}"
    )
