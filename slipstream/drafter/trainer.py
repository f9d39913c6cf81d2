"""Trains a draft head: optimizer steps on batches of sequences, with exact resume.

The trainer knows neither the source of the sequences nor the policy: each call gets the policy's
current embedding and LM head. A call can be stopped between two steps. The head's parameters are
fp32 master weights; the forward pass computes in the dtype of the embedding and LM head.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint.saved import Saved, restoring
from slipstream.drafter.losses import DraftLoss, DraftSamples, draft_loss
from slipstream.drafter.sequences import DraftSequence, VocabLayers, collate
from slipstream.errors import ConfigError, TrainingError, check_at_least_one
from slipstream.models.decoder import supports_varlen
from slipstream.models.draft.model import DraftModel
from slipstream.training.optim import OptimSettings, PolicyOptimizer

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainSettings:
    """Settings of an optimizer step. `draft_loss` explains the loss weights and depths.

    `compute_dtype` is the run's dtype. `grad_clip` is the maximum norm of the gradient, None for no
    limit. `topk` is the number of candidates in the top-k mass loss. `feature_noise` is the width
    of the uniform noise on the head's input features, which depends on `seed` and the step (EAGLE
    uses 0.2 * 512 / length). Raises ConfigError for impossible values.
    """

    optim: OptimSettings
    compute_dtype: torch.dtype = torch.float32
    grad_clip: float | None = 1.0
    value_weight: float = 1.0
    soft_weight: float = 0.1
    acceptance_weight: float = 0.0
    topk_mass_weight: float = 0.0
    topk: int = 1
    depth: int = 1
    depth_decay: float = 1.0
    feature_noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "depth", "topk", where="draft head: ")
        losses = ("value_weight", "soft_weight", "acceptance_weight", "topk_mass_weight")
        for name in (*losses, "depth_decay", "feature_noise"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"draft head: {name}={value} must be a finite number >= 0")
        if not any(getattr(self, name) for name in losses):
            raise ConfigError(
                f"draft head: {'=0, '.join(losses)}=0 leave nothing to learn; set one above 0"
            )
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ConfigError(f"draft head: grad_clip={self.grad_clip} must be > 0, or null")


class DraftTrainer:
    """Trains `head`; `step` counts the optimizer steps so far."""

    def __init__(self, head: DraftModel, settings: DraftTrainSettings) -> None:
        self.head = head
        self.settings = settings
        self.step = 0
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Start a new optimizer, at the same step of the learning rate schedule."""
        self._optimizer = PolicyOptimizer(
            self.head.named_parameters(),
            self.settings.optim,
            dtype=self.settings.compute_dtype,
        )

    def train(
        self,
        batches: Iterable[Sequence[DraftSequence]],
        vocab: VocabLayers,
        *,
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        after_step: Callable[[int, Metrics], None] | None = None,
    ) -> list[Metrics]:
        """Take one optimizer step per batch, at most `steps`, and return the metrics of each.

        `stop` is called before each step, before a batch is taken; True ends the call. `after_step`
        gets the number of the finished step and its metrics. Raises TrainingError if the loss or
        the gradient is not finite; the head is then unchanged by that step.
        """
        history: list[Metrics] = []
        source = iter(batches)
        while (steps is None or len(history) < steps) and not stop():
            sequences = next(source, None)
            if sequences is None:
                break
            history.append(self._train_on(sequences, vocab))
            if after_step is not None:
                after_step(self.step, history[-1])
        return history

    @torch.no_grad()
    def evaluate(
        self, sequences: Sequence[DraftSequence], vocab: VocabLayers, *, batch_size: int
    ) -> Metrics:
        """Soft loss and accuracy of the first draft, as means over all slots of `sequences`."""
        loss, correct, slots = 0.0, 0.0, 0
        packed = self.head.pack(vocab.dtype)
        padded = not supports_varlen(self.head.config, vocab.dtype, vocab.embedding_VD.device)
        for start in range(0, len(sequences), batch_size):
            some = [each for each in sequences[start : start + batch_size] if each.slots]
            if not some:
                continue
            found = draft_loss(packed, collate(some, vocab, padded=padded))
            loss += float(found.soft) * found.slots
            correct += float(found.accuracy) * found.slots
            slots += found.slots
        return {
            "draft/val_soft_loss": loss / max(slots, 1),
            "draft/val_accuracy": correct / max(slots, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Copies of the step count and the optimizer state. The caller saves the head's
        parameters."""
        return {"step": self.step, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. The head must already have the parameters of that moment.

        Raises CheckpointError if the state belongs to another head.
        """
        with restoring("draft head"):
            saved = Saved(state).fields("step", "optimizer")
            step = saved["step"].count()
            with restoring("optimizer"):
                self._optimizer.load_state_dict(saved["optimizer"].value)
                # After `reset_optimizer` it has made fewer steps than the trainer.
                self._optimizer.check_steps(min(step, self._optimizer.steps()))
        self.step = step

    def check_never_reset(self) -> None:
        """Raise CheckpointError unless the restored optimizer made all steps of the trainer."""
        with restoring("optimizer"):
            self._optimizer.check_steps(self.step)

    def _train_on(self, sequences: Sequence[DraftSequence], vocab: VocabLayers) -> Metrics:
        started = time.perf_counter()
        s = self.settings
        like = vocab.embedding_VD
        padded = not supports_varlen(self.head.config, vocab.dtype, like.device)
        batch = collate(sequences, vocab, padded=padded)
        self._optimizer.zero_grad()
        loss = draft_loss(
            self.head.pack(vocab.dtype),
            batch,
            value_weight=s.value_weight,
            soft_weight=s.soft_weight,
            acceptance_weight=s.acceptance_weight,
            topk_mass_weight=s.topk_mass_weight,
            topk=s.topk,
            depth=s.depth,
            depth_decay=s.depth_decay,
            noise=self._noise(batch),
        )
        loss.total.backward()  # type: ignore[no-untyped-call]
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._optimizer.parameters, s.grad_clip or math.inf)
        )
        total = float(loss.total.detach())
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise TrainingError(
                f"draft head, step {self.step + 1}: loss {total} or gradient norm {norm} is not "
                "finite; lower the learning rates of speculative.draft.optim (during RL: "
                "speculative.train.optim), or check the features for NaN"
            )
        rates = self._optimizer.learning_rates(self.step)
        self._optimizer.step(self.step)
        self._optimizer.zero_grad()
        self.step += 1
        metrics = _metrics(loss, total) | {f"draft/{name}": rate for name, rate in rates.items()}
        tokens = sum(len(sequence.tokens) for sequence in sequences)
        return metrics | {
            "draft/grad_norm": norm,
            "draft/tokens_per_second": tokens / (time.perf_counter() - started),
        }

    def _noise(self, batch: DraftSamples) -> Tensor | None:
        """Noise like the head's inputs, a function of seed and step; None if it is off."""
        width, like = self.settings.feature_noise, batch.head_inputs
        if not width:
            return None
        key = hashlib.blake2b(f"{self.settings.seed}/{self.step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
        drawn = torch.rand(like.shape, generator=generator).sub_(0.5).mul_(width)
        return drawn.to(like.device, like.dtype)


def _metrics(loss: DraftLoss, total: float) -> Metrics:
    optional = {
        "draft/value_loss": loss.value,
        "draft/acceptance_loss": loss.acceptance,
        "draft/topk_mass_loss": loss.topk_mass,
    }
    return {name: float(part) for name, part in optional.items() if part is not None} | {
        "draft/loss": total,
        "draft/soft_loss": float(loss.soft),
        "draft/accuracy": float(loss.accuracy),
        "draft/slots": loss.slots,
    }
