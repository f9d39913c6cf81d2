"""A draft head that learns while the policy does: slices of training, and what may be published.

    rows of an RL step -> collector -> buffer -> slice of training -> held-out check -> new version

Nothing here knows engines, clocks or the RL loop: whoever has time to spare (the loop itself every
few steps, a process beside a rollout) asks for a slice, may stop it between two optimizer steps,
and hands the head on where the check has let it pass. Blocks; works on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import PARAM_LIST, AveragedModel

from slipstream.drafter.acceptance import Acceptance, HeldOut, Loss, measure_acceptance
from slipstream.drafter.collector import FeatureCollector
from slipstream.drafter.sequences import DraftSequence, PolicyEnds
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings, Metrics
from slipstream.errors import CheckpointError, ConfigError, TrainingError, check_at_least_one
from slipstream.models.draft.model import DraftModel
from slipstream.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class CoTrainSettings:
    """`updates` optimizer steps on `batch_size` responses each make a slice; acceptance is measured
    for up to `accept_depth` drafts in a row. Of the averaged weights, each step keeps `ema_decay`,
    at least 0 and below 1. Raises ConfigError for counts below 1 and for another decay."""

    train: DraftTrainSettings
    updates: int
    batch_size: int
    accept_depth: int
    ema_decay: float

    def __post_init__(self) -> None:
        check_at_least_one(self, "updates", "batch_size", "accept_depth", where="co-training: ")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"co-training: ema_decay={self.ema_decay} must be at least 0, where the newest "
                "weights are taken as they are, and below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What came of a slice: its metrics, and whether there is a new version to publish, or a
    trained head was held back. Neither where nothing was trained, or where training failed:
    `failure` says why."""

    metrics: Metrics
    adopted: bool
    held_back: bool
    failure: str | None = None


class CoTraining:
    """The head that learns, the average of what it has been, and the head in use.

    RL goes on, so the learning rate cannot fall, and at a constant one the weights keep jumping
    about what they are looking for: their exponential moving average is nearer to it (Polyak and
    Juditsky 1992). It is what is measured and published, and begins as the plain mean, in which the
    weights before the first step have no part.

    `version` counts what was published; a slice whose head accepts less on the held-out responses
    than the one in use, by more than chance, is held back, and training goes on from it. What each
    head that is published loses against the one before, within chance, adds up (`lost`) until one
    makes up for it: many small losses in a row are no chance. (Measuring the best head so far
    again on each slice's responses would say the same for half as much time again: the head in use
    is measured on them anyway, and where nothing adds up it is the best one.)
    """

    def __init__(
        self, head: DraftModel, collector: FeatureCollector, settings: CoTrainSettings
    ) -> None:
        """`head` learns; as it is now it is in use, as version 0."""
        self.collector = collector
        self.settings = settings
        self.trainer = DraftTrainer(head, settings.train)
        self.average = _average(head, settings.ema_decay)
        self.version = self.hold_backs = self.failures = self.tokens_seen = 0
        self.trained_to: PolicyVersion | None = None
        """The newest policy whose responses the head in use was trained on; None: of none that is
        known."""
        self.lost = Loss()
        self.used = head.blank().to(head.device)
        self.used.load_state_dict(head.state_dict())

    def published(self) -> list[tuple[str, Tensor]]:
        """Copies of the weights of the head in use."""
        return list(_tensors(self.used).items())

    def slice(
        self, ends: PolicyEnds, *, step: int, stop: Callable[[], bool] = lambda: False
    ) -> Slice:
        """Train after RL step `step`; `ends` are the policy's as it is now, `stop` ends training
        between two optimizer steps.

        Where loss or gradient is not finite the slice ends, with the head in use as it was: drafts
        are not worth the end of a run, and the policy's own loss is watched elsewhere. Training
        goes on from the head in use, with a new optimizer: what led there is not to be trusted.
        """
        s, held_out = self.settings, self.collector.held_out
        started = time.perf_counter()
        batches = self.collector.buffer.batches(s.batch_size, f"{s.train.seed}/{step}")
        before = self._accepted(self.used, held_out, ends)
        history, failure = list[Metrics](), None
        try:
            history = self.trainer.train(
                self._counted(batches),
                ends,
                steps=s.updates,
                stop=stop,
                after_step=lambda _, __: self.average.update_parameters(self.trainer.head),
            )
        except TrainingError as error:
            failure = str(error)
            self.failures += 1
            self._begin_anew()
        trained = self._averaged
        after = self._accepted(trained, held_out, ends) if history else before
        adopted = False
        if history and before is not None and after is not None:
            lost = self.lost + after.loss_against(before)
            adopted = not lost.beyond_chance
            if adopted:
                self.lost = lost if lost.share > 0 else Loss()
        if adopted:
            self.used.load_state_dict(trained.state_dict())
            self.version += 1
            self.trained_to = self.collector.buffer.newest_used
        held_back = bool(history) and not adopted
        self.hold_backs += held_back
        metrics = _of_training(history) | _of_acceptance(before, "before") | self.counts()
        metrics |= _of_acceptance(after, "after")
        metrics["drafter/seconds"] = time.perf_counter() - started
        return Slice(metrics=metrics, adopted=adopted, held_back=held_back, failure=failure)

    def counts(self) -> Metrics:
        """What has happened so far."""
        buffer = self.collector.buffer
        return {
            "drafter/updates": self.trainer.step,
            "drafter/tokens_seen": self.tokens_seen,
            "drafter/version": self.version,
            "drafter/publishes": self.version,
            "drafter/hold_backs": self.hold_backs,
            "drafter/failed_slices": self.failures,
            "drafter/buffer_bytes": buffer.nbytes,
            "drafter/buffer_samples": len(buffer),
            "drafter/evicted_samples": buffer.counts.evicted,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bitwise equal continuation needs, as a tree with tensors."""
        return {
            "trainer": self.trainer.state_dict(),
            "head": _tensors(self.trainer.head),
            "average": {name: t.clone() for name, t in self.average.state_dict().items()},
            "used": _tensors(self.used),
            "version": self.version,
            "hold_backs": self.hold_backs,
            "failures": self.failures,
            "tokens_seen": self.tokens_seen,
            "trained_to": self.trained_to,
            "lost": [self.lost.share, self.lost.variance],
            "collector": self.collector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises CheckpointError where it is another version's."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise CheckpointError(
                f"the state of co-training has no {', '.join(sorted(missing))}: another version "
                "wrote it; begin anew with its head (trainer.resume_mode=disable and "
                "speculative.eagle.spec_model_path), or go on with that version"
            )
        self.trainer.head.load_state_dict(state["head"])
        self.trainer.load_state_dict(state["trainer"])
        self.average.load_state_dict(state["average"])
        self.used.load_state_dict(state["used"])
        for name in ("version", "hold_backs", "failures", "tokens_seen"):
            setattr(self, name, int(state[name]))
        self.trained_to = state["trained_to"]
        self.lost = Loss(*state["lost"])
        self.collector.load_state_dict(state["collector"])

    def begin_with(
        self, weights: Mapping[str, Tensor], version: int, trained_to: PolicyVersion | None
    ) -> None:
        """Go on from a head in use, of which nothing else is known."""
        self.used.load_state_dict(weights)
        self._begin_anew()
        self.version, self.trained_to, self.lost = version, trained_to, Loss()

    @property
    def _averaged(self) -> DraftModel:
        head = self.average.module
        assert isinstance(head, DraftModel)
        return head

    def _begin_anew(self) -> None:
        """Train from the head in use, with a new optimizer and a new average."""
        self.trainer.head.load_state_dict(self.used.state_dict())
        self.trainer.forget_moments()
        self.average = _average(self.trainer.head, self.settings.ema_decay)

    def _counted(self, batches: Iterator[list[DraftSequence]]) -> Iterator[list[DraftSequence]]:
        for batch in batches:
            self.tokens_seen += sum(len(sequence.tokens) for sequence in batch)
            yield batch

    def _accepted(
        self, head: DraftModel, held_out: Sequence[HeldOut], ends: PolicyEnds
    ) -> Acceptance | None:
        """None where there is nothing to measure on."""
        if not held_out:
            return None
        s = self.settings
        return measure_acceptance(
            head, held_out, ends, depth=s.accept_depth, batch_size=s.batch_size
        )


def _average(head: DraftModel, decay: float) -> AveragedModel:
    """Of nothing yet: its first update takes the weights as they are."""

    def update(averages: PARAM_LIST, weights: PARAM_LIST, taken: Tensor | int) -> None:
        keep = min(decay, int(taken) / (int(taken) + 1))
        torch._foreach_lerp_(averages, weights, 1 - keep)

    return AveragedModel(head, multi_avg_fn=update)


def _tensors(head: DraftModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in head.named_parameters()}


def _of_training(history: Sequence[Metrics]) -> Metrics:
    """Means over a slice, under the names of co-training."""
    if not history:
        return {}
    names = {
        "drafter/loss": "draft/loss",
        "drafter/feature_loss": "draft/value_loss",
        "drafter/token_loss": "draft/soft_loss",
        "drafter/acceptance_loss": "draft/acceptance_loss",
        "drafter/topk_mass_loss": "draft/topk_mass_loss",
    }
    return {
        ours: sum(m[theirs] for m in history) / len(history)
        for ours, theirs in names.items()
        if theirs in history[0]
    }


def _of_acceptance(acceptance: Acceptance | None, when: str) -> Metrics:
    if acceptance is None:
        return {}
    walk = acceptance.walk(acceptance.depth)
    metrics = {
        f"drafter/acceptance_rate/{when}": walk.accepted / max(walk.drafted, 1),
        f"drafter/accept_length/{when}": walk.tokens_per_verification,
    }
    for depth in range(1, acceptance.depth + 1):
        metrics[f"drafter/acceptance_rate_{depth}/{when}"] = acceptance.at_depth(depth)
    if when == "after":
        metrics["drafter/acceptance_rate"] = metrics[f"drafter/acceptance_rate/{when}"]
    return metrics
