"""Optimizer steps with gradient clipping that skip and count non-finite updates.

This module knows gradients and an optimizer, not the model. The backends and the critic use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from slipstream.checkpoint.saved import REMEDY, Saved, restoring
from slipstream.errors import CheckpointError, ConfigError, TrainingError
from slipstream.models.sharded import full
from slipstream.training.optim import PolicyOptimizer
from slipstream.training.protocol import StateTree

_COUNTS = ("updates", "optimizer_steps", "skipped_steps", "nonfinite_in_a_row")
WEIGHT_VERSION = "weight_version"
"""The count that a backend adds."""
_OF_BACKENDS = ("lora",)
"""The entry that a backend adds if it trains an adapter."""


class GuardedOptimizer:
    """A `PolicyOptimizer` with clipping and protection against non-finite updates.

    `grad_clip` is the maximum norm of the whole gradient, None for no limit. An update with a
    non-finite loss or gradient is skipped; more than `max_nonfinite_steps` of them in a row are an
    error. `prefix` is the metrics prefix of `/grad_norm` and `/lr`. `causes` names values of a
    batch that may be broken, for the error message.

    Raises:
        ConfigError: an impossible `grad_clip` or `max_nonfinite_steps`.
    """

    def __init__(
        self,
        optimizer: PolicyOptimizer,
        *,
        grad_clip: float | None,
        max_nonfinite_steps: int,
        prefix: str,
        causes: str,
    ) -> None:
        if grad_clip is not None and not grad_clip > 0:
            raise ConfigError(f"grad_clip={grad_clip} must be > 0, or null for none")
        if max_nonfinite_steps < 0:
            raise ConfigError(f"max_nonfinite_steps={max_nonfinite_steps} must be at least 0")
        self.optimizer = optimizer
        self._grad_clip = grad_clip
        self._max_nonfinite = max_nonfinite_steps
        self._prefix = prefix
        self._causes = causes
        # Whether gradients were added since the last update, and whether the loss was finite.
        self.has_gradients = False
        self.finite = True
        self.updates = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.nonfinite_in_a_row = 0

    def step(
        self,
        before_change: Callable[[], None] = lambda: None,
        *,
        schedule_step: int | None = None,
    ) -> dict[str, float]:
        """Clip the gradients, update the weights, and clear the gradients. Returns metrics.

        `before_change` is called before the weights change. `schedule_step` is the step of the
        learning rate schedule, from 0; None for the number of updates so far.

        Raises:
            TrainingError: there are no gradients, or too many non-finite updates in a row.
        """
        if not self.has_gradients:
            raise TrainingError("optim_step() without gradients; call forward_backward() first")
        scheduled = self.updates if schedule_step is None else schedule_step
        metrics = {
            f"{self._prefix}/{name}": rate
            for name, rate in self.optimizer.learning_rates(scheduled).items()
        }
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        if self.finite:
            norm = full(torch.nn.utils.get_total_norm(gradients))
            metrics[f"{self._prefix}/grad_norm"] = norm.item()
            self.finite = math.isfinite(norm.item())
        if self.finite:
            before_change()
            if self._grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    self.optimizer.parameters, self._grad_clip, norm
                )
            self.optimizer.step(scheduled)
            self.optimizer_steps += 1
            self.nonfinite_in_a_row = 0
        else:
            self.skipped_steps += 1
            self.nonfinite_in_a_row += 1
        # A skipped update still advances the schedule, which counts the steps of the run.
        self.updates += 1
        self.forget_gradients()
        if self.nonfinite_in_a_row > self._max_nonfinite:
            raise TrainingError(
                f"loss or gradient norm was not finite in {self.nonfinite_in_a_row} updates in a "
                f"row (update {self.updates}); likely causes: the learning rate "
                f"({metrics[f'{self._prefix}/lr']:.3g} now) is too high, {self._causes} in the "
                "batch are NaN or infinite, or an earlier update broke the weights: resume from "
                "an earlier checkpoint with a lower learning rate"
            )
        return metrics

    def forget_gradients(self) -> None:
        """Clear the gradients and start a new update."""
        self.optimizer.zero_grad()
        self.has_gradients = False
        self.finite = True

    def state_dict(self) -> StateTree:
        """The state: `{"optimizer": ..., "counts": ...}`.

        Raises:
            TrainingError: there are gradients, which are not part of the state.
        """
        if self.has_gradients:
            raise TrainingError(
                "state_dict() between forward_backward() and optim_step() would lose gradients; "
                "call it after optim_step()"
            )
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"optimizer": self.optimizer.state_dict(), "counts": counts}

    def load_state_dict(self, state: StateTree) -> None:
        """Restore `state_dict()`.

        Raises:
            CheckpointError: the state is incomplete, or belongs to another optimizer or model.
        """
        saved = Saved(state).fields("optimizer", "counts", optional=_OF_BACKENDS)
        counts = saved["counts"].fields(*_COUNTS, optional=(WEIGHT_VERSION,))
        values = {name: counts[name].count() for name in _COUNTS}
        done = values["optimizer_steps"] + values["skipped_steps"]
        if values["updates"] != done or values["nonfinite_in_a_row"] > values["skipped_steps"]:
            text = ", ".join(f"{name}={value}" for name, value in values.items())
            raise CheckpointError(
                f"the counts {text} contradict each other: updates is the sum of optimizer_steps "
                f"and skipped_steps, and nonfinite_in_a_row a part of the latter; {REMEDY}"
            )
        with restoring("optimizer"):
            self.optimizer.load_state_dict(saved["optimizer"].value)
            self.optimizer.check_steps(values["optimizer_steps"])
        for name, value in values.items():
            setattr(self, name, value)
        self.forget_gradients()
