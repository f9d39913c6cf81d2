"""AdamW over named parameters, with torch's fused kernel.

The update is bitwise equal to `torch.optim.AdamW(fused=True)` (Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101). The kernel is called directly, because any `torch.optim`
optimizer imports torch's compiler, which takes longer than the first steps of a small model.
`optim` calls this module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.checkpoint.saved import REMEDY, is_finite
from slipstream.errors import CheckpointError
from slipstream.models.sharded import full, slice_like, whole_copy

LARGEST_STEP = 1 << 24
"""Step counts are float32, which has no larger successive integers. They stay at this value."""


class AdamW:
    """Updates named parameters and keeps their moments. Parameters without gradient do not
    change."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._parameters = parameters
        self._betas = betas
        self._eps = eps
        self._weight_decay = weight_decay
        self._state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters from their gradients. Weight decay applies to matrices only."""
        for name in self._parameters:
            # Also for parameters without gradient yet, so that the state always has all names.
            self._state_of(name)
        for decay, matrices in ((self._weight_decay, True), (0.0, False)):
            names = [
                name
                for name, p in self._parameters.items()
                if p.grad is not None and (p.ndim >= 2) == matrices
            ]
            if not names:
                continue
            parameters: list[Tensor] = [self._parameters[name] for name in names]
            states = [self._state_of(name) for name in names]
            steps = [state["step"] for state in states]
            for step in steps:
                step.add_(1)
            torch._fused_adamw_(
                parameters,
                [p.grad for p in parameters if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of step count and moments by parameter name; empty before the first step.
        Collective for sharded parameters, which are gathered into host memory."""
        return {
            name: {key: whole_copy(value) for key, value in state.items()}
            for name, state in self._state.items()
        }

    def gather(self) -> None:
        """Take part when another process calls `state_dict` (collective)."""
        for state in self._state.values():
            for value in state.values():
                full(value)

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore `state_dict()`. Names and shapes must match the parameters.

        Raises CheckpointError for values that no update writes.
        """
        placed = {
            name: {key: self._placed(name, key, value) for key, value in entries.items()}
            for name, entries in state.items()
        }
        self._state = placed

    def steps(self) -> int:
        """The largest number of updates of a parameter."""
        return max((int(state["step"].item()) for state in self._state.values()), default=0)

    def _placed(self, name: str, key: str, value: Tensor) -> Tensor:
        """A copy of one entry on its parameter's device, sharded like it. Step counts are not
        sharded."""
        parameter = self._parameters[name]
        copied = value.to(device=parameter.device, copy=True)
        # A parameter without dimensions looks like a step count, so only the key decides.
        result = copied if key == "step" else slice_like(copied, parameter)
        own = getattr(result, "to_local", lambda: result)()
        if not is_finite(own):
            problem = "has NaN or infinite values"
        elif key != "exp_avg" and bool((own < 0).any()):
            problem = "has negative values"
        elif key == "step" and not (float(own).is_integer() and own <= LARGEST_STEP):
            problem = f"is {float(own):g}, not a whole number up to {LARGEST_STEP}"
        else:
            return result
        raise CheckpointError(f"adamw.{name}.{key} {problem}; {REMEDY}")

    def _state_of(self, name: str) -> dict[str, Tensor]:
        state = self._state.get(name)
        if state is None:
            parameter = self._parameters[name]
            state = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            self._state[name] = state
        return state
