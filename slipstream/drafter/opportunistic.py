"""Co-training of the draft head in a process beside the run, whenever a core is idle.

The process is `drafter.worker`; here is what the RL loop does with it: rows and the policy's ends
go there after each step, and heads come back and go to the engines. Made by `build.cotraining`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import anyio
from torch import Tensor

from slipstream.checkpoint.layout import cotraining_file
from slipstream.checkpoint.tree import load_tree
from slipstream.deadlines import Deadlines, run_in_daemon
from slipstream.drafter.buffer import BufferedSequence
from slipstream.drafter.collector import FeatureForwarder
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.interval import (
    DraftReceiver,
    failed,
    head_writer,
    publish_head,
    staleness,
    taken,
)
from slipstream.drafter.sequences import PolicyEnds
from slipstream.drafter.worker import DraftWorker, Learned, WorkerSetup
from slipstream.errors import TrainingError
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, PolicyVersion

_PATIENT = 10
"""RL steps after which it is said that no core has been lent."""

_POLL_SECONDS = 0.25
"""Between two looks, while responses are generated, for a head that has been trained."""

_REST_SECONDS = 10.0
"""Between two heads for running requests: each of them is drafted for worse, until the new head has
read some twenty tokens."""


_PATIENCE_SECONDS = 60.0
"""Until a process that does not begin, or an engine that does not take a head, is waited for no
longer: the run goes on without."""


class CoreLender(Protocol):
    """An engine that decodes the last responses on one thread."""

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """See `EmbeddedEngine`."""
        ...


class OpportunisticTraining:
    """`DrafterTraining` by a process that runs only while a core is idle.

    It is given the rows of every step, trains until there is nothing left in them or the next
    update begins, and its heads are published during the rollout, or after the step, in which they
    arrive. When it ends by itself or is killed, the run says so and starts another one from the
    head in use. Where there are lenders, for the run computes on all cores, it stands still
    (stopped by signal) but while one lends a core.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        ends: Callable[[], PolicyEnds],
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        lenders: Sequence[CoreLender] = (),
        notify: Callable[[str], None],
        deadlines: Deadlines,
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """`ends` copies those of the policy as it is, on `compute`; `decoded` has features of the
        engines' decoding, where they are to be taken from there."""
        self._setup = setup
        self._lenders, self._lent_now, self._times_lent, self._said = lenders, 0, 0, False
        for lender in lenders:
            lender.lend_to(self._lent)
        self._ends = ends
        self._engines = engines
        self._compute = compute
        self._notify = notify
        self._deadlines = deadlines
        self.decoded = decoded
        self._forwarder = FeatureForwarder(setup.collector, decoded)
        self._worker: DraftWorker | None = None
        self._restarts = self._hold_backs = self._failures = 0
        self._seconds = self._seconds_in_rollout = 0.0
        self._metrics: dict[str, float] = {}
        self._published_at = -_REST_SECONDS
        self._publications = self._in_rollouts = 0
        self.training = HeadInUse(setup)

    @property
    def sink(self) -> FeatureSink:
        """See `DrafterTraining`."""
        return self._forwarder

    async def begin(self) -> None:
        """See `DrafterTraining`."""
        async with self._deadlines.stage("draft head", "the start of the process that trains it"):
            begun = await run_in_daemon(lambda: self._started().wait_until_ready(_PATIENCE_SECONDS))
        if not begun:
            self._notify(
                "the process that trains the draft head has not begun within "
                f"{_PATIENCE_SECONDS:.0f} s; the run goes on without waiting for it"
            )

    @asynccontextmanager
    async def rollout(self, step: int) -> AsyncIterator[None]:
        """See `DrafterTraining`. Heads that arrive meanwhile go to the engines at once."""
        # Another one may have taken its place.
        await self.begin()
        if self.decoded is not None:
            self.decoded.begin(wanted=True)
        worker = self._worker
        before = 0.0 if worker is None else worker.cpu_seconds
        failures: list[Exception] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publish_meanwhile, failures)
            try:
                yield
            except Exception as error:
                failures.insert(0, error)
            finally:
                tasks.cancel_scope.cancel()
        if failures:
            raise failures[0]  # as itself, not in a group
        self._seconds_in_rollout = 0.0
        if worker is not None and worker is self._worker:
            # It may have ended.
            self._seconds_in_rollout = max(0.0, worker.cpu_seconds - before)

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """See `DrafterTraining`. The update needs all cores."""
        self._forwarder.begin_step(step, version)
        if self._worker is not None:
            try:
                self._worker.stop()
            except TrainingError as error:
                self._lost(self._worker, error)

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """See `DrafterTraining`."""
        self._receive()
        await self._publish()
        metrics, self._metrics = self._metrics, {}
        metrics |= taken(self.decoded) | staleness(self.training.trained_to, version)
        if self._lenders and not self._times_lent and step >= _PATIENT and not self._said:
            self._said = True
            self._notify(
                f"step {step}: the draft head has had no time to learn yet: no rollout has ended "
                "with so few responses that a core was free; raise "
                "actor_rollout_ref.rollout.one_thread_below, or set "
                "speculative.train.mode=interval"
            )
        ends = await self._compute.submit(self._ends)
        kept = self._forwarder.take()
        async with self._deadlines.stage(
            "draft head", "handing rows to the process that trains it"
        ):
            await run_in_daemon(lambda: self._hand_on(kept, ends, step))
        return metrics | {
            "drafter/version": self.training.version,
            "drafter/publishes": self._publications,
            "drafter/publishes_in_rollouts": self._in_rollouts,
            "drafter/hold_backs": self._hold_backs,
            "drafter/failed_slices": self._failures,
            "drafter/restarts": self._restarts,
            "drafter/cpu_seconds": self._seconds,
            "rollout/used_idle_core_seconds": self._seconds_in_rollout,
        }

    async def restore(self, checkpoint: Path) -> None:
        """Go on with the head that was in use, and a new optimizer; the engines get it, too."""
        file = cotraining_file(checkpoint)
        if not file.exists():
            self._notify(f"{checkpoint} was made without co-training, which begins anew")
            return
        self.training.load_state_dict(load_tree(file))
        await publish_head(self._engines, self.training.version, self.training.weights)

    def snapshot(self) -> Callable[[Path], None]:
        """See `SavesItself`: the head in use. What else training knows is given up with its
        process."""
        training = self.training
        return self._compute.run(lambda: head_writer(training.setup.blank, training.state_dict()))

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _receive(self) -> None:
        """Take in what was learned since, and the metrics of the last slice that learned."""
        for learned in self._results():
            self._seconds += learned.cpu_seconds
            self._hold_backs += learned.held_back
            if learned.failure is not None:
                self._failures += 1
                self._notify(failed(learned.step, learned.failure))
            if learned.weights is not None:
                self.training.take(learned)
            if "drafter/loss" in learned.metrics:
                self._metrics = dict(learned.metrics)

    async def _publish(self) -> None:
        """Give the engines the newest head that they have not got."""
        if self.training.fresh:
            self._published_at = time.monotonic()
            await publish_head(self._engines, self.training.version, self.training.weights)
            self.training.fresh = False
            self._publications += 1

    async def _publish_meanwhile(self, failures: list[Exception]) -> None:
        try:
            while True:
                await anyio.sleep(_POLL_SECONDS)
                self._receive()
                rested = time.monotonic() - self._published_at >= _REST_SECONDS
                if self.training.fresh and rested:
                    # All engines get it, also where the last response ends in the meantime; one
                    # that is stuck is not waited for: who waits for its responses will say so.
                    with anyio.move_on_after(_PATIENCE_SECONDS, shield=True) as waited:
                        await self._publish()
                        self._in_rollouts += 1
                    if waited.cancelled_caught:
                        self._notify(
                            f"an engine has not taken a draft head within {_PATIENCE_SECONDS:.0f} "
                            "s; it is tried again"
                        )
        except Exception as error:
            failures.append(error)

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

    def _hand_on(self, kept: Sequence[BufferedSequence], ends: PolicyEnds, step: int) -> None:
        worker = self._started()
        try:
            worker.learn(kept, ends, step)
        except TrainingError as error:
            self._lost(worker, error)

    def _started(self) -> DraftWorker:
        if self._worker is None:
            # There, for the process ends with the thread that starts it.
            self._worker = self._compute.run(lambda: DraftWorker(self.training.setup))
        return self._worker

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

    @property
    def trained_to(self) -> PolicyVersion | None:
        """See `CoTraining`."""
        return self._setup.trained_to

    def take(self, learned: Learned) -> None:
        """A new version of it."""
        assert learned.weights is not None, "it has been let pass"
        self._set(learned.version, learned.weights, learned.trained_to)
        self.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Head and version, and what it was trained to."""
        used = dict(self.weights)
        return {"used": used, "version": self.version, "trained_to": self.trained_to}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, or from that of `CoTraining`."""
        self._set(int(state["version"]), state["used"], state["trained_to"])
        self.fresh = False

    def _set(
        self, version: int, weights: Mapping[str, Tensor], trained_to: PolicyVersion | None
    ) -> None:
        self._setup = replace(
            self._setup, version=version, weights=dict(weights), trained_to=trained_to
        )
