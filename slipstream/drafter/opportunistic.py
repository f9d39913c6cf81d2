"""Opportunistic co-training: a separate process trains the draft head whenever a core is idle.

`drafter.worker` is the process. This module connects it to the RL loop: after each step it sends
the rows and the policy's embedding and LM head to the worker, and publishes the trained heads to
the engines. `build.cotraining` makes it.
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

from slipstream.checkpoint.saved import MOST_PER_STEP, Saved, restoring
from slipstream.checkpoint.state import RunState, cotraining_file
from slipstream.checkpoint.tree import load_tree
from slipstream.deadlines import Deadlines, run_in_daemon
from slipstream.drafter.buffer import BufferedSequence
from slipstream.drafter.collector import FeatureForwarder
from slipstream.drafter.cotraining import check_saved_tokens, version_of, weights_like
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.interval import (
    DraftReceiver,
    decoded_metrics,
    failure_note,
    head_writer,
    publish_head,
    staleness,
)
from slipstream.drafter.sequences import VocabLayers
from slipstream.drafter.worker import DraftWorker, SliceResult, WorkerSetup
from slipstream.errors import TrainingError
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, PolicyVersion

_NO_CORE_STEPS = 10
"""RL steps after which the user is told that no core has been lent yet."""

_POLL_SECONDS = 0.25
"""Seconds between two checks for a newly trained head during a rollout."""

_PUBLISH_SECONDS = 10.0
"""Least seconds between two publications during a rollout. After each one the drafts of running
requests are worse, until the new head has processed some twenty tokens."""


_TIMEOUT_SECONDS = 60.0
"""Seconds to wait for the worker to start, or for an engine to load a head. Then the run continues
without it."""


class CoreLender(Protocol):
    """An engine that decodes the last responses of a rollout on one thread."""

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Call `lent(True)` when a core becomes free, and `lent(False)` when the engine needs it
        again."""
        ...


class OpportunisticTraining:
    """`DrafterTraining` in a worker process that runs only while a core is idle.

    The worker gets the rows of every step. It trains until they are used up or the next update
    starts. Its heads are published during the rollout, or after the step. If the worker dies, the
    run reports it and starts another one from the head in use. If the run itself uses all cores,
    there are lenders: the worker is then suspended by SIGSTOP except while an engine lends a core.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        vocab: Callable[[], VocabLayers],
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        lenders: Sequence[CoreLender] = (),
        notify: Callable[[str], None],
        deadlines: Deadlines,
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """`vocab` copies the policy's current embedding and LM head; it is called on `compute`.
        `decoded` holds features from the engines' decoding, if these are to be used."""
        self._setup = setup
        self._lenders, self._lent_now, self._times_lent, self._warned = lenders, 0, 0, False
        for lender in lenders:
            lender.lend_to(self._lent)
        self._vocab = vocab
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
        self._published_at = -_PUBLISH_SECONDS
        self._publications = self._in_rollouts = 0
        self.training = HeadInUse(setup)

    @property
    def sink(self) -> FeatureSink:
        """The sink that collects the rows of a step."""
        return self._forwarder

    async def begin(self) -> None:
        """Start the worker process, and wait until it is ready."""
        async with self._deadlines.stage("draft head", "the start of the process that trains it"):
            ready = await run_in_daemon(lambda: self._started().wait_until_ready(_TIMEOUT_SECONDS))
        if not ready:
            self._notify(
                "the process that trains the draft head has not started within "
                f"{_TIMEOUT_SECONDS:.0f} s; the run continues without waiting for it"
            )

    @asynccontextmanager
    async def rollout(self, step: int) -> AsyncIterator[None]:
        """A context manager for the rollout of `step`. Heads that arrive during it are published at
        once."""
        # The worker may have been replaced since the last step.
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
            raise failures[0]  # itself, not an ExceptionGroup
        self._seconds_in_rollout = 0.0
        if worker is not None and worker is self._worker:
            # `cpu_seconds` is 0 if the process has ended.
            self._seconds_in_rollout = max(0.0, worker.cpu_seconds - before)

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """Stop the worker's slice before the update, which needs all cores."""
        self._forwarder.begin_step(step, version)
        if self._worker is not None:
            try:
                self._worker.stop()
            except TrainingError as error:
                self._lost(self._worker, error)

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """Publish a trained head, send the rows of the step to the worker, and return metrics."""
        self._receive()
        await self._publish()
        metrics, self._metrics = self._metrics, {}
        metrics |= decoded_metrics(self.decoded) | staleness(self.training.trained_to, version)
        if self._lenders and not self._times_lent and step >= _NO_CORE_STEPS and not self._warned:
            self._warned = True
            self._notify(
                f"step {step}: the draft head has not been trained yet, because no rollout has "
                "freed a core; raise actor_rollout_ref.rollout.one_thread_below, or set "
                "speculative.train.mode=interval"
            )
        vocab = await self._compute.submit(self._vocab)
        entries = self._forwarder.take()
        async with self._deadlines.stage(
            "draft head", "handing rows to the process that trains it"
        ):
            await run_in_daemon(lambda: self._send_rows(entries, vocab, step))
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
        """Restore the head in use from an RL checkpoint and publish it to the engines. The
        optimizer starts anew."""
        file = cotraining_file(checkpoint)
        if not file.exists():
            self._notify(
                f"{checkpoint} was made without co-training; co-training starts from the initial "
                "draft head"
            )
            return
        run = RunState.load(checkpoint)
        with restoring(file):
            self.training.load_state_dict(load_tree(file))
            self.training.check_position(run.step, run.policy_version)
        await publish_head(self._engines, self.training.version, self.training.weights)

    def snapshot(self) -> Callable[[Path], None]:
        """A function that writes the head in use into a checkpoint. The worker's optimizer and
        buffer are not saved."""
        training = self.training
        return self._compute.run(lambda: head_writer(training.setup.blank, training.state_dict()))

    def close(self) -> None:
        """End the worker process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _receive(self) -> None:
        """Process new results of the worker; keep the metrics of the last slice that trained."""
        for result in self._results():
            self._seconds += result.cpu_seconds
            self._hold_backs += result.held_back
            if result.failure is not None:
                self._failures += 1
                self._notify(failure_note(result.step, result.failure))
            if result.weights is not None:
                self.training.update(result)
            if "drafter/loss" in result.metrics:
                self._metrics = dict(result.metrics)

    async def _publish(self) -> None:
        """Send the newest head to the engines if they do not have it yet."""
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
                due = time.monotonic() - self._published_at >= _PUBLISH_SECONDS
                if self.training.fresh and due:
                    # Shielded: all engines get the head even if the rollout ends now. The timeout
                    # is for a stuck engine; the rollout's own deadline reports it.
                    with anyio.move_on_after(_TIMEOUT_SECONDS, shield=True) as waited:
                        await self._publish()
                        self._in_rollouts += 1
                    if waited.cancelled_caught:
                        self._notify(
                            f"an engine has not loaded a draft head within {_TIMEOUT_SECONDS:.0f} "
                            "s; the run will try again"
                        )
        except Exception as error:
            failures.append(error)

    def _lent(self, free: bool) -> None:
        """An engine lends a core or needs it again. Called on the engine's compute thread."""
        self._lent_now += 1 if free else -1
        self._times_lent += free
        worker = self._worker
        if worker is not None:
            worker.set_running(self._lent_now > 0)

    def _results(self) -> list[SliceResult]:
        if self._worker is None:
            return []
        try:
            return self._worker.results()
        except TrainingError as error:
            self._lost(self._worker, error)
            return []

    def _send_rows(
        self, entries: Sequence[BufferedSequence], vocab: VocabLayers, step: int
    ) -> None:
        worker = self._started()
        try:
            worker.learn(entries, vocab, step)
        except TrainingError as error:
            self._lost(worker, error)

    def _started(self) -> DraftWorker:
        if self._worker is None:
            # On the compute thread: the process ends with the thread that starts it.
            self._worker = self._compute.run(lambda: DraftWorker(self.training.setup))
        return self._worker

    def _lost(self, worker: DraftWorker, error: TrainingError) -> None:
        # First: engines call `_lent` from another thread.
        self._worker = None
        worker.close()
        self._restarts += 1
        self._notify(f"{error}; a new process starts from the head in use, and the run continues")


class HeadInUse:
    """The draft head that the engines have, and its state in a checkpoint."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self.fresh = False
        """Whether the engines do not have it yet."""

    @property
    def setup(self) -> WorkerSetup:
        """The setup for a worker that starts now."""
        return self._setup

    @property
    def version(self) -> int:
        return self._setup.version

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._setup.weights

    @property
    def trained_to(self) -> PolicyVersion | None:
        """Newest policy version whose responses the head was trained on; None if unknown."""
        return self._setup.trained_to

    def update(self, result: SliceResult) -> None:
        """Replace the head by a newly trained one."""
        assert result.weights is not None, "only adopted heads have weights"
        self._set(result.version, result.weights, result.trained_to)
        self.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """The head's weights, its version and `trained_to`."""
        used = dict(self.weights)
        return {"used": used, "version": self.version, "trained_to": self.trained_to}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` of this class or of `CoTraining`."""
        saved = Saved(state)
        any_vocabulary = self._setup.train.sizes_vocabulary
        weights = weights_like(saved.field("used"), self.weights, any_vocabulary=any_vocabulary)
        with restoring("used"):
            check_saved_tokens(weights, self._setup.blank.config)
        version, trained_to = saved.field("version").count(), saved.field("trained_to")
        self._set(version, weights, version_of(trained_to))
        self.fresh = False

    def check_position(self, step: int, version: PolicyVersion) -> None:
        """Raise CheckpointError if the restored head is newer than RL step `step` with the policy
        version `version`."""
        Saved(self.version, "version").count((1 + step) * MOST_PER_STEP)
        if self.trained_to is not None:
            Saved(self.trained_to, "trained_to").count(version)

    def _set(
        self, version: int, weights: Mapping[str, Tensor], trained_to: PolicyVersion | None
    ) -> None:
        self._setup = replace(
            self._setup, version=version, weights=dict(weights), trained_to=trained_to
        )
