"""Muon over many small matrices at once.

The update of each matrix is its momentum, orthogonalised by Newton-Schulz iterations (Jordan et al.
2024, https://kellerjordan.github.io/posts/muon/). Same rule and defaults as `torch.optim.Muon`, but
matrices of equal shape are iterated as one batch, and in bf16, as torch does, only where that is
what the run computes in: many CPUs emulate it. Of parameters that are spread over processes each
keeps and iterates the whole matrices. Called by `optim`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slipstream.models.sharded import full, slice_like

NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5; they push singular values into about [0.7, 1.2]."""
EPS = 1e-7


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Newton-Schulz on a batch of matrices with R <= C: U V^T of each, roughly."""
    a, b, c = COEFFICIENTS
    norms = torch.linalg.matrix_norm(matrices_NRC, keepdim=True)
    x: Tensor = matrices_NRC / norms.clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class BatchedMuon:
    """Momentum and updates of named 2-D parameters."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Iterates in `dtype`."""
        self._dtype = dtype
        self._parameters = parameters
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._stacks: dict[tuple[int, int], list[str]] = {}
        for name, parameter in parameters.items():
            rows, columns = parameter.shape
            shape = (min(rows, columns), max(rows, columns))
            self._stacks.setdefault(shape, []).append(name)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters from their gradients.

        A matrix moves by lr * sqrt(max(1, rows / columns)) along its orthogonalised momentum.
        """
        for shape, names in self._stacks.items():
            grads = torch.stack([_wide(_gradient(self._parameters[name])) for name in names])
            if shape not in self._buffers:
                self._buffers[shape] = torch.zeros_like(grads)
            buffer = self._buffers[shape]
            buffer.lerp_(grads, 1 - self._momentum)
            updates = orthogonalize(grads.lerp_(buffer, self._momentum).to(self._dtype))
            for name, update in zip(names, updates, strict=True):
                parameter = self._parameters[name]
                rows, columns = parameter.shape
                parameter.mul_(1 - lr * self._weight_decay)
                scale = math.sqrt(max(1.0, rows / columns))
                own = slice_like(update.T if rows > columns else update, parameter)
                parameter.add_(own, alpha=-lr * scale)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Momentum by parameter name, in the parameter's shape; empty before the first step."""
        return {
            name: {"momentum_buffer": _like(self._parameters[name], row).clone()}
            for shape, buffer in self._buffers.items()
            for name, row in zip(self._stacks[shape], buffer, strict=True)
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Go on from `state_dict()`; names and shapes have to be those of the parameters."""
        self._buffers = {}
        if not state:
            return
        for shape, names in self._stacks.items():
            self._buffers[shape] = torch.stack(
                [_wide(state[n]["momentum_buffer"].to(self._parameters[n].device)) for n in names]
            )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return full(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _like(parameter: nn.Parameter, wide: Tensor) -> Tensor:
    return wide.T.contiguous() if parameter.shape[0] > parameter.shape[1] else wide
