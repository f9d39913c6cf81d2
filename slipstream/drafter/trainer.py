"""Training of a draft head: batches in, optimizer steps, state that resumes exactly.

Knows neither where sequences come from nor the policy: its embedding and LM head are given to each
call, as they are then. A call ends between two steps as soon as it is asked to. The fp32 parameters
of the head are the masters; the forward pass is in the dtype of what is passed in.
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

from slipstream.drafter.losses import DraftLoss, DraftSamples, draft_loss
from slipstream.drafter.sequences import DraftSequence, PolicyEnds, collate
from slipstream.errors import CheckpointError, ConfigError, TrainingError, check_at_least_one
from slipstream.models.decoder import takes_sequences_in_a_row
from slipstream.models.draft.model import DraftModel
from slipstream.training.optim import OptimSettings, PolicyOptimizer

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainSettings:
    """What one optimizer step does; see `draft_loss` for the weights and depths.

    `compute_dtype` is what the run computes in. `grad_clip` bounds the norm of the gradient, None
    leaves it. `topk` is how many candidates `topk_mass_weight` is about. `feature_noise` is the
    width of the uniform noise on given features, a function of `seed` and the step (EAGLE's is
    0.2 * 512 / length). Raises ConfigError for values that cannot be.
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
                f"draft head: {'=0, '.join(losses)}=0 leave nothing to learn; raise one"
            )
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ConfigError(f"draft head: grad_clip={self.grad_clip} must be > 0, or null")


class DraftTrainer:
    """An optimizer over the parameters of `head`, and how many steps it has taken."""

    def __init__(self, head: DraftModel, settings: DraftTrainSettings) -> None:
        self.head = head
        self.settings = settings
        self.step = 0
        self.forget_moments()

    def forget_moments(self) -> None:
        """Go on with a new optimizer, at the same step of its schedule."""
        self._optimizer = PolicyOptimizer(
            self.head.named_parameters(),
            self.settings.optim,
            dtype=self.settings.compute_dtype,
        )

    def train(
        self,
        batches: Iterable[Sequence[DraftSequence]],
        ends: PolicyEnds,
        *,
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        after_step: Callable[[int, Metrics], None] | None = None,
    ) -> list[Metrics]:
        """At most `steps` optimizer steps, one per batch; the metrics of each.

        `stop` is asked before each step and ends the call; no batch is taken then. `after_step`
        gets the number of the finished step and its metrics. Raises TrainingError where loss or
        gradient is not finite, with the head as it was before that step.
        """
        history: list[Metrics] = []
        source = iter(batches)
        while (steps is None or len(history) < steps) and not stop():
            sequences = next(source, None)
            if sequences is None:
                break
            history.append(self._train_on(sequences, ends))
            if after_step is not None:
                after_step(self.step, history[-1])
        return history

    def state_dict(self) -> dict[str, Any]:
        """Steps and optimizer state, copies. The head's parameters are saved beside it."""
        return {"step": self.step, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; the head must have the parameters of that moment.

        Raises CheckpointError where the state is another head's.
        """
        try:
            step, optimizer = int(state["step"]), state["optimizer"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of the draft head's training cannot be read ({error!r}); resume from "
                "another checkpoint"
            ) from error
        try:
            self._optimizer.load_state_dict(optimizer)
        except CheckpointError as error:
            raise CheckpointError(f"of the draft head: {error}") from error
        self.step = step

    def _train_on(self, sequences: Sequence[DraftSequence], ends: PolicyEnds) -> Metrics:
        started = time.perf_counter()
        s = self.settings
        like = ends.embedding_VD
        padded = not takes_sequences_in_a_row(self.head.config, ends.dtype, like.device)
        batch = collate(sequences, ends, padded=padded)
        self._optimizer.zero_grad()
        loss = draft_loss(
            self.head.pack(ends.dtype),
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
                f"draft head, step {self.step + 1}: loss {total} and gradient norm {norm} are not "
                "both finite; lower the learning rates of speculative.draft.optim (during RL: "
                "speculative.train.optim), or look for NaN in the features"
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
        width, like = self.settings.feature_noise, batch.given
        if not width:
            return None
        key = hashlib.blake2b(f"{self.settings.seed}/{self.step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
        drawn = torch.rand(like.shape, generator=generator).sub_(0.5).mul_(width)
        return drawn.to(like.device, like.dtype)


def _metrics(loss: DraftLoss, total: float) -> Metrics:
    some = {
        "draft/value_loss": loss.value,
        "draft/acceptance_loss": loss.acceptance,
        "draft/topk_mass_loss": loss.topk_mass,
    }
    return {name: float(part) for name, part in some.items() if part is not None} | {
        "draft/loss": total,
        "draft/soft_loss": float(loss.soft),
        "draft/accuracy": float(loss.accuracy),
        "draft/slots": loss.slots,
    }
