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

from slipstream.checkpoint.saved import MOST_PER_STEP, Saved, restoring
from slipstream.checkpoint.state import RunState, cotraining_file, draft_folder
from slipstream.checkpoint.tree import load_tree, tree_writer
from slipstream.deadlines import Deadlines
from slipstream.drafter.cotraining import CoTraining, Slice, match_vocabulary, version_of
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.sequences import VocabLayers
from slipstream.models.draft.files import save_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import FeatureSink, PolicyVersion, UpdateKind, WeightUpdate

_OF_HEAD = {"used", "version", "trained_to"}
"""Entries of the state in opportunistic mode, which is only the head in use."""


class DraftReceiver(Protocol):
    """What co-training needs from an engine."""

    async def update_drafter(self, update: WeightUpdate) -> None:
        """Load the weights of a draft head."""
        ...


class IntervalTraining:
    """`DrafterTraining` after every `interval`-th RL step, on the trainer's compute thread."""

    def __init__(
        self,
        training: CoTraining,
        vocab: Callable[[], VocabLayers],
        engines: Sequence[DraftReceiver],
        compute: ComputeThread,
        *,
        interval: int,
        notify: Callable[[str], None],
        deadlines: Deadlines,
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """`vocab` copies the policy's current embedding and LM head; it is called on `compute`.
        `decoded` is the one that the collector reads."""
        self.training = training
        self.decoded = decoded
        self._vocab = vocab
        self._engines = engines
        self._compute = compute
        self._interval = interval
        self._notify = notify
        self._deadlines = deadlines
        self._reported = False

    @property
    def sink(self) -> FeatureSink:
        """The sink that collects the rows of a step."""
        return self.training.collector

    async def begin(self) -> None:
        """Does nothing: there is nothing to start."""

    @asynccontextmanager
    async def rollout(self, step: int) -> AsyncIterator[None]:
        """A context manager for the rollout of `step`. Collects features from decoding if the step
        is trained on."""
        if self.decoded is not None:
            self.decoded.begin(wanted=self._wants(step))
        yield

    def begin_step(self, step: int, version: PolicyVersion) -> None:
        """Tell the collector whether to collect the rows of this step."""
        self.training.collector.begin_step(step, version, wanted=self._wants(step))

    async def after_step(self, step: int, version: PolicyVersion) -> dict[str, float]:
        """Train a slice if the interval has passed, publish the head, and return metrics."""
        metrics = decoded_metrics(self.decoded)
        if step % self._interval:
            metrics |= self.training.counts()
        else:
            metrics |= await self._train(step)
        return metrics | staleness(self.training.trained_to, version)

    def _wants(self, step: int) -> bool:
        """Whether rows of `step` are still recent enough at the next training."""
        return -step % self._interval < self.training.collector.buffer.settings.lookback_steps

    async def _train(self, step: int) -> dict[str, float]:
        async with self._deadlines.stage("draft head", "a slice of its training"):
            done = await self._compute.submit(lambda: self._slice(step))
        if done.failure is not None:
            self._notify(failure_note(step, done.failure))
        if done.adopted:
            await self._publish()
        elif done.held_back and not self._reported:
            self._reported = True
            measured = "drafter/acceptance_rate" in done.metrics
            why = "there are no held-out responses yet"
            if measured:
                why = "its acceptance on held-out responses is lower, by more than chance"
            self._notify(
                f"step {step}: the trained draft head is held back, because {why}; the head in use "
                "stays. This is reported once; drafter/hold_backs counts all cases"
            )
        return done.metrics

    async def restore(self, checkpoint: Path) -> None:
        """Restore co-training from an RL checkpoint and publish the head in use to the engines. If
        the checkpoint has no co-training, keep the initial head."""
        file = cotraining_file(checkpoint)
        if not file.exists():
            self._notify(
                f"{checkpoint} was made without co-training; co-training starts from the initial "
                "draft head"
            )
            return
        with restoring(file):
            state = load_tree(file)
            await self._load(state, checkpoint)
        await self._publish()

    async def _load(self, state: Any, checkpoint: Path) -> None:
        run = RunState.load(checkpoint)
        if dict(Saved(state).items()).keys() != _OF_HEAD:

            def load() -> None:
                self.training.load_state_dict(state)
                self.training.check_position(run.step, run.policy_version)

            await self._compute.submit(load)
        else:
            used = Saved(state).fields(*_OF_HEAD)
            version = used["version"].count((1 + run.step) * MOST_PER_STEP)
            trained_to = version_of(used["trained_to"])
            self._notify(
                f"{checkpoint} has a draft head from speculative.train.mode=opportunistic, which "
                "saves no optimizer state; its optimizer starts anew"
            )
            await self._compute.submit(
                lambda: self.training.start_from(used["used"].value, version, trained_to)
            )

    def snapshot(self) -> Callable[[Path], None]:
        """A function that writes the head in use and the full state of co-training into a
        checkpoint. A resumed run continues bitwise equal."""
        training = self.training
        return self._compute.run(lambda: head_writer(training.used, training.state_dict()))

    def _slice(self, step: int) -> Slice:
        return self.training.slice(self._vocab(), step=step)

    async def _publish(self) -> None:
        # On the compute thread: here torch would start a second thread pool, which would compete
        # with the compute thread's for the rest of the run.
        weights = dict(await self._compute.submit(self.training.published))
        await publish_head(self._engines, self.training.version, weights)


def head_writer(like: DraftModel, state: Mapping[str, Any]) -> Callable[[Path], None]:
    """A function that writes `state` and the head in use, a model like `like`, into a checkpoint.

    The head is written in the format of `slipstream draft`. All torch work is done now, so the
    function can run on another thread.
    """
    with torch.device("meta"):
        used = like.blank()
    match_vocabulary(used, state["used"])
    used.load_state_dict(state["used"], assign=True)
    write_state = tree_writer(dict(state))

    def write(checkpoint: Path) -> None:
        save_draft_head(used, draft_folder(checkpoint))
        write_state(cotraining_file(checkpoint))

    return write


async def publish_head(
    engines: Sequence[DraftReceiver], version: int, weights: Mapping[str, Tensor]
) -> None:
    """Send the head to every engine. An engine loads it between two of its decode steps."""
    for engine in engines:
        update = WeightUpdate(
            version=version, kind=UpdateKind.DRAFT, buckets=[list(weights.items())]
        )
        await engine.update_drafter(update)


def decoded_metrics(decoded: DecodedFeatures | None) -> dict[str, float]:
    """The number of rows of the step whose features came from the engine. Ends the collection of
    features from decoding."""
    if decoded is None:
        return {}
    metrics = {"drafter/decoded_samples": float(decoded.taken)}
    decoded.begin(wanted=False)
    return metrics


def staleness(trained_to: PolicyVersion | None, version: PolicyVersion) -> dict[str, float]:
    """Policy versions since the newest responses that the head in use was trained on."""
    return {} if trained_to is None else {"drafter/staleness_versions": float(version - trained_to)}


def failure_note(step: int, failure: str) -> str:
    """The note to the user about a failed slice."""
    return (
        f"step {step}: training of the draft head failed; it restarts from the head in use, which "
        f"stays in use: {failure}"
    )
