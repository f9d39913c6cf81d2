"""Co-training: trains a draft head during RL in slices, and checks each result before it is used.

    rows of an RL step -> collector -> buffer -> slice of training -> held-out check -> new version

This module knows no engines, no clocks and no RL loop. The caller (`interval` every few steps, or
the worker process of `opportunistic`) runs a slice, may stop it between two optimizer steps, and
publishes the head if it passed the check. Calls block, and run on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import PARAM_LIST, AveragedModel

from slipstream.checkpoint.saved import MOST_PER_STEP, REMEDY, Saved, restoring
from slipstream.drafter.acceptance import Acceptance, HeldOut, Regression, measure_acceptance
from slipstream.drafter.collector import FeatureCollector
from slipstream.drafter.linear_start import start_linear
from slipstream.drafter.sequences import DraftSequence, VocabLayers, written
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings, Metrics
from slipstream.drafter.vocabulary import TokenCounts, best_size
from slipstream.errors import CheckpointError, ConfigError, TrainingError, check_at_least_one
from slipstream.models.config import ModelConfig
from slipstream.models.draft.model import (
    DRAFT_TOKENS,
    DraftModel,
    check_end_tokens,
    check_tokens,
)
from slipstream.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class CoTrainSettings:
    """Settings of co-training.

    A slice has `updates` optimizer steps on `batch_size` responses each. Acceptance is measured
    for chains of `accept_depth` draft tokens. `ema_decay`, in [0, 1), is the decay of the averaged
    weights. `is_new`: the head is untrained, and its first slice begins with `start_linear`.
    `sizes_vocabulary`: that slice also lowers the size of the draft vocabulary to `best_size`.
    Raises ConfigError for counts below 1 and for other decays.
    """

    train: DraftTrainSettings
    updates: int
    batch_size: int
    accept_depth: int
    ema_decay: float
    is_new: bool = False
    sizes_vocabulary: bool = False

    def __post_init__(self) -> None:
        check_at_least_one(self, "updates", "batch_size", "accept_depth", where="co-training: ")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"co-training: ema_decay={self.ema_decay} must be at least 0 (no averaging) and "
                "below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The result of a slice.

    `adopted`: the trained head is the new version to publish. `held_back`: it failed the held-out
    check. Both are False if nothing was trained. `failure` is the reason if training failed.
    """

    metrics: Metrics
    adopted: bool
    held_back: bool
    failure: str | None = None


_COUNTS = ("version", "hold_backs", "failures", "tokens_seen")
_RENEW_ABOVE = 0.002
"""The draft vocabulary is renewed if other tokens cover this share more of what was written."""
_FEWEST_RESPONSES = 32
"""With fewer responses, the draft vocabulary of a new head keeps its size."""
_KEPT_COUNTS = 0.5
"""Share of the token counts that stays at each slice."""
_MOST_TOKENS = 1 << 31
"""No step of a head's training sees more tokens."""


def check_saved_tokens(weights: Mapping[str, Tensor], policy: ModelConfig) -> None:
    """Raise CheckpointError if the draft vocabulary among a head's saved weights is not one of the
    policy."""
    for name, tensor in weights.items():
        if name.endswith(DRAFT_TOKENS):
            try:
                check_tokens(tensor.tolist(), policy.vocab_size)
                check_end_tokens(tensor.tolist(), policy.eos_token_ids)
            except ConfigError as error:
                raise CheckpointError(f"{name}: {error}; {REMEDY}") from error


def version_of(saved: Saved) -> PolicyVersion | None:
    """Return a saved policy version, or None."""
    return None if saved.value is None else saved.count()


class CoTraining:
    """The head in training, the average of its weights, and the head in use.

    The policy keeps changing, so the learning rate cannot decay to 0. At a constant rate the
    weights fluctuate around the optimum, and their exponential moving average is closer to it
    (Polyak and Juditsky 1992). The average is what is measured and published. It starts as the
    plain mean of the weights after each step; the initial weights have no part in it.

    `version` counts the published heads. A slice's head is held back if its acceptance on held-out
    responses is lower than that of the head in use, by more than chance; training then continues
    from the trained head. Regressions within chance are still published, but they add up
    (`regression`) until a head makes up for them, because many small losses in a row are not
    chance. (Measuring the best head so far on the responses of each slice would give the same
    result at 1.5 times the cost. The head in use is measured anyway, and it is the best one if
    nothing has added up.)
    """

    def __init__(
        self, head: DraftModel, collector: FeatureCollector, settings: CoTrainSettings
    ) -> None:
        """Train `head`. A copy of its current weights is in use, as version 0."""
        self.collector = collector
        self.settings = settings
        self.trainer = DraftTrainer(head, settings.train)
        self.average = _average(head, settings.ema_decay)
        self.version = self.hold_backs = self.failures = self.tokens_seen = 0
        self.trained_to: PolicyVersion | None = None
        """Newest policy version whose responses the head in use was trained on; None if
        unknown."""
        self.regression = Regression()
        self.token_counts: TokenCounts | None = None
        """Counts of the tokens that the policy wrote, for a head whose draft vocabulary can change;
        else None."""
        if head.draft_tokens is not None and head.algorithm == "EAGLE":
            self.token_counts = TokenCounts(head.config.vocab_size)
        self._counted_to: int | None = None
        self.used = head.copy()

    def published(self) -> list[tuple[str, Tensor]]:
        """Copies of the weights of the head in use, by name."""
        return list(_tensors(self.used).items())

    def slice(
        self, vocab: VocabLayers, *, step: int, stop: Callable[[], bool] = lambda: False
    ) -> Slice:
        """Train for one slice after RL step `step`, and check the result on held-out responses.

        `vocab` are the current policy's embedding and LM head. `stop` ends training between two
        optimizer steps. If the loss or the gradient is not finite, the slice ends and the head in
        use stays, but no error is raised: a failing draft head must not end a run. Training then
        restarts from the head in use with a new optimizer.
        """
        s, held_out = self.settings, self.collector.held_out
        started = time.perf_counter()
        vocabulary = self._renew_vocabulary()
        batches = self.collector.buffer.batches(s.batch_size, f"{s.train.seed}/{step}")
        before = self._accepted(self.used, held_out, vocab)
        if s.is_new and self._is_untrained:
            start_linear(self.trainer.head, [e.sequence for e in self.collector.buffer], vocab)
        history, failure = list[Metrics](), None
        try:
            history = self.trainer.train(
                self._counted(batches),
                vocab,
                steps=s.updates,
                stop=stop,
                after_step=lambda _, __: self.average.update_parameters(self.trainer.head),
            )
        except TrainingError as error:
            failure = str(error)
            self.failures += 1
            self._restart()
        trained = self._averaged
        after = self._accepted(trained, held_out, vocab) if history else before
        adopted = False
        if history and before is not None and after is not None:
            regression = self.regression + after.regression_from(before)
            adopted = not regression.significant
            if adopted:
                self.regression = regression if regression.share > 0 else Regression()
        if adopted:
            _copy_head(trained, self.used)
            self.version += 1
            self.trained_to = self.collector.buffer.newest_used
        held_back = bool(history) and not adopted
        self.hold_backs += held_back
        metrics = _of_training(history) | _of_acceptance(before, "before") | self.counts()
        metrics |= _of_acceptance(after, "after") | vocabulary
        metrics["drafter/seconds"] = time.perf_counter() - started
        return Slice(metrics=metrics, adopted=adopted, held_back=held_back, failure=failure)

    def _renew_vocabulary(self) -> Metrics:
        """Replace the draft vocabulary of the head in training if the policy writes other tokens.

        Before the first step of a new head, also lower the number of tokens to the best one. The
        new vocabulary is used when the trained head is adopted. Only a head without an LM head of
        its own can change its tokens. Returns the coverage of the vocabulary before and after, and
        its size, as metrics; none for a head that drafts all tokens.
        """
        head, counts = self.trainer.head, self.token_counts
        if counts is None or head.tokens is None:
            return {}
        counts.fade(_KEPT_COUNTS)
        for entry in self.collector.entries:
            if self._counted_to is None or entry.step > self._counted_to:
                counts.add(written(entry.sequence))
        steps = [entry.step for entry in self.collector.entries]
        self._counted_to = max(steps, default=self._counted_to)
        size = len(head.tokens)
        if self.settings.sizes_vocabulary and self._is_untrained:
            size = self._best_size(self.used.draft_vocab_size)
        best = counts.most_frequent(size, always=head.config.eos_token_ids, before=head.tokens)
        before, after = counts.coverage(head.tokens), counts.coverage(best)
        if size != len(head.tokens) or after > before + _RENEW_ABOVE:
            for each in (head, self._averaged):
                each.set_tokens(torch.tensor(best))
        else:
            after = before
        return {
            "drafter/vocabulary_coverage/before": before,
            "drafter/vocabulary_coverage": after,
            "drafter/vocabulary_tokens": float(head.draft_vocab_size),
        }

    def counts(self) -> Metrics:
        """Counters since the start, as metrics."""
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
            "lost": [self.regression.share, self.regression.variance],
            "collector": self.collector.state_dict(),
            "token_counts": None if self.token_counts is None else self.token_counts.counts.clone(),
            "counted_to": self._counted_to,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises CheckpointError if another version of Slipstream wrote
        it."""
        saved = dict(Saved(state).items())
        names = self.state_dict().keys()
        missing = names - saved.keys()
        if missing:
            raise CheckpointError(
                f"the state of co-training has no {', '.join(sorted(missing))}, because another "
                "version of Slipstream wrote it; start anew from its head "
                "(trainer.resume_mode=disable and speculative.eagle.spec_model_path), or resume "
                "with that version"
            )
        Saved(state).fields(*names)
        counts = {name: saved[name].count() for name in _COUNTS}
        trained_to = version_of(saved["trained_to"])
        token_counts, counted_to = self._saved_counts(saved)
        share, variance = saved["lost"].elements(2)
        regression = Regression(share.number(), variance.number(0.0))
        parts: dict[str, nn.Module] = {
            "head": self.trainer.head, "average": self.average, "used": self.used,
        }  # fmt: skip
        weights = {name: self._saved_weights(saved[name], part) for name, part in parts.items()}
        sizes = {
            name: [len(t) for key, t in tensors.items() if key.endswith(DRAFT_TOKENS)]
            for name, tensors in weights.items()
        }
        if sizes["head"] != sizes["average"]:
            raise CheckpointError(
                f"the head has {sizes['head']} draft tokens, but its average "
                f"{sizes['average']}; {REMEDY}"
            )
        for name, tensors in weights.items():
            with restoring(name):
                check_saved_tokens(tensors, self.used.config)
        with restoring("trainer"):
            self.trainer.load_state_dict(saved["trainer"].value)
            if not counts["failures"]:
                self.trainer.check_never_reset()
            averaged = int(weights["average"]["n_averaged"])
            Saved(averaged, "the number of averaged weights").count(self.trainer.step)
        with restoring("collector"):
            self.collector.load_state_dict(saved["collector"].value)
        self._check_sequences()
        for head, name in (
            (self.trainer.head, "head"),
            (self._averaged, "average"),
            (self.used, "used"),
        ):
            match_vocabulary(head, weights[name])
        for name, part in parts.items():
            part.load_state_dict(weights[name])
        for name, count in counts.items():
            setattr(self, name, count)
        self.trained_to, self.regression = trained_to, regression
        self.token_counts, self._counted_to = token_counts, counted_to

    def _saved_counts(self, saved: Mapping[str, Saved]) -> tuple[TokenCounts | None, int | None]:
        """The token counts of a saved state. Raises CheckpointError if they do not fit."""
        counted_to = version_of(saved["counted_to"])
        if self.token_counts is None:
            return None, counted_to
        found = TokenCounts(len(self.token_counts.counts))
        found.counts = saved["token_counts"].tensor(found.counts)
        if float(found.counts.min()) < 0:
            raise CheckpointError(f"token_counts has numbers below 0; {REMEDY}")
        return found, counted_to

    def check_position(self, step: int, version: PolicyVersion) -> None:
        """Raise CheckpointError if the restored state is newer than RL step `step` with the policy
        version `version`, or has more slices, steps or tokens than are possible."""
        entries, buffer = self.collector.entries, self.collector.buffer
        most, tokens = (1 + step) * MOST_PER_STEP, (1 + self.trainer.step) * _MOST_TOKENS
        for name, value, limit in (
            ("trainer.step", self.trainer.step, most),
            *((name, getattr(self, name), most) for name in _COUNTS if name != "tokens_seen"),
            ("tokens_seen", self.tokens_seen, tokens),
            ("trained_to", self.trained_to or 0, version),
            ("collector.buffer.newest_used", buffer.newest_used or 0, version),
            ("collector.buffer.counts.received", buffer.counts.received, most),
            ("counted_to", self._counted_to or 0, step),
            ("the step of a response", max((e.step for e in entries), default=0), step),
            ("the version of a response", max((e.version for e in entries), default=0), version),
        ):
            if value > limit:
                raise CheckpointError(
                    f"{name} is {value}, but at step {step}, with policy version {version}, it is "
                    f"at most {limit}; {REMEDY}"
                )

    def _check_sequences(self) -> None:
        """Raise CheckpointError if a restored response is not one of this policy."""
        config = self.used.config
        width = config.hidden_size * (1 + len(self.collector.settings.aux_layers))
        for entry in self.collector.entries:
            ids = entry.sequence.tokens or [0]
            least, most, found = min(ids), max(ids), entry.sequence.features_TF.shape[1]
            if found != width or least < 0 or most >= config.vocab_size:
                raise CheckpointError(
                    f"collector: a response of step {entry.step} has {found} features per token "
                    f"and token ids from {least} to {most}, but the policy has {width} features "
                    f"and {config.vocab_size} tokens; {REMEDY}"
                )

    def start_from(
        self, weights: Mapping[str, Tensor], version: int, trained_to: PolicyVersion | None
    ) -> None:
        """Start from the weights of a head in use, without optimizer state or buffer."""
        checked = self._saved_weights(Saved(weights, "used"), self.used)
        match_vocabulary(self.used, checked)
        self.used.load_state_dict(checked)
        self._restart()
        self.version, self.trained_to, self.regression = version, trained_to, Regression()

    def _saved_weights(self, saved: Saved, part: nn.Module) -> dict[str, Tensor]:
        """The saved weights of a part. Its draft vocabulary may have another size if co-training
        may lower the size."""
        return weights_like(saved, part.state_dict(), any_vocabulary=self.settings.sizes_vocabulary)

    @property
    def _is_untrained(self) -> bool:
        """Whether the head in training has made no step since it was new. It is new again if its
        first slice fails."""
        return self.version == 0 and int(self.average.n_averaged) == 0

    def _best_size(self, most: int) -> int:
        """The best size of the draft vocabulary up to `most`, for which memory was estimated."""
        entries = self.collector.entries
        if len(entries) < _FEWEST_RESPONSES:
            return most
        prompts = [entry.key.prompt for entry in entries]
        responses = [written(entry.sequence) for entry in entries]
        return min(most, best_size(responses, self.used.config, prompts) or most)

    @property
    def _averaged(self) -> DraftModel:
        head = self.average.module
        assert isinstance(head, DraftModel)
        return head

    def _restart(self) -> None:
        """Train from the head in use, with a new optimizer and a new average."""
        _copy_head(self.used, self.trainer.head)
        self.trainer.reset_optimizer()
        self.average = _average(self.trainer.head, self.settings.ema_decay)

    def _counted(self, batches: Iterator[list[DraftSequence]]) -> Iterator[list[DraftSequence]]:
        for batch in batches:
            self.tokens_seen += sum(len(sequence.tokens) for sequence in batch)
            yield batch

    def _accepted(
        self, head: DraftModel, held_out: Sequence[HeldOut], vocab: VocabLayers
    ) -> Acceptance | None:
        """Acceptance on the held-out responses; None if there are none."""
        if not held_out:
            return None
        s = self.settings
        return measure_acceptance(
            head, held_out, vocab, depth=s.accept_depth, batch_size=s.batch_size
        )


def _average(head: DraftModel, decay: float) -> AveragedModel:
    """An empty moving average: its first update copies the weights."""

    def update(averages: PARAM_LIST, weights: PARAM_LIST, count: Tensor | int) -> None:
        keep = min(decay, int(count) / (int(count) + 1))
        torch._foreach_lerp_(averages, weights, 1 - keep)

    return AveragedModel(head, multi_avg_fn=update)


def weights_like(
    saved: Saved, like: Mapping[str, Tensor], *, any_vocabulary: bool
) -> dict[str, Tensor]:
    """Return saved weights of a head with the names, shapes and dtypes of `like`.

    With `any_vocabulary`, the draft vocabulary may have another number of tokens; they are not
    checked here (`check_saved_tokens`). Raises CheckpointError for other weights.
    """
    expected = dict(like)
    if any_vocabulary:
        for name, value in saved.items():
            if name.endswith(DRAFT_TOKENS) and name in like and isinstance(value.value, Tensor):
                expected[name] = like[name].new_empty(value.value.numel())
    return saved.tensors(expected)


def match_vocabulary(head: DraftModel, weights: Mapping[str, Tensor]) -> None:
    """If the draft vocabulary among `weights` has another size than the head's, give it to the
    head, so that it can load the weights."""
    for name, tensor in weights.items():
        if name.endswith(DRAFT_TOKENS) and len(tensor) != head.draft_vocab_size:
            head.set_tokens(tensor)


def _copy_head(source: DraftModel, target: DraftModel) -> None:
    """Copy weights and draft vocabulary."""
    weights = source.state_dict()
    match_vocabulary(target, weights)
    target.load_state_dict(weights)


def _tensors(head: DraftModel) -> dict[str, Tensor]:
    """Copies of the weights, and of the draft vocabulary if there is one."""
    return {name: t.detach().clone() for name, t in head.state_dict().items()}


def _of_training(history: Sequence[Metrics]) -> Metrics:
    """Means over a slice, as metrics of co-training."""
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
    replay = acceptance.replay(acceptance.depth)
    metrics = {
        f"drafter/acceptance_rate/{when}": replay.accepted / max(replay.drafted, 1),
        f"drafter/accept_length/{when}": replay.tokens_per_verification,
    }
    for depth in range(1, acceptance.depth + 1):
        metrics[f"drafter/acceptance_rate_{depth}/{when}"] = acceptance.at_depth(depth)
    if when == "after":
        metrics["drafter/acceptance_rate"] = metrics[f"drafter/acceptance_rate/{when}"]
    return metrics
