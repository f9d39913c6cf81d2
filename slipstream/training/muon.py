"""Muon, batched over matrices of equal shape.

The update of a matrix is its momentum, orthogonalized by Newton-Schulz iterations (Jordan et al.
2024, https://kellerjordan.github.io/posts/muon/). Rule and defaults are those of
`torch.optim.Muon`. There are two differences: matrices of equal shape are iterated as one batch,
and the iterations run in bf16 only if the run computes in bf16, because many CPUs emulate bf16. If
parameters are sharded over processes, each process keeps and iterates the whole matrices. `optim`
calls this module.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slipstream.checkpoint.saved import REMEDY, is_finite
from slipstream.errors import CheckpointError
from slipstream.models.sharded import full, slice_like

NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial a x + b x^3 + c x^5, which moves singular values to about [0.7,
1.2]."""
EPS = 1e-7


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Approximate U V^T of each matrix U S V^T of a batch (N, R, C) with R <= C, by Newton-Schulz
    iterations."""
    a, b, c = COEFFICIENTS
    norms = torch.linalg.matrix_norm(matrices_NRC, keepdim=True)
    x: Tensor = matrices_NRC / norms.clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class BatchedMuon:
    """Updates named 2-D parameters and keeps their momentum."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the dtype of the Newton-Schulz iterations."""
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

    @property
    def started(self) -> bool:
        """Whether the optimizer has made an update, and so has momentum."""
        return bool(self._buffers)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters from their gradients.

        A matrix changes by -lr * sqrt(max(1, rows / columns)) times its orthogonalized momentum.
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
        """Restore `state_dict()`. Names and shapes must match the parameters.

        Raises CheckpointError for NaN and infinite values.
        """
        for name, entries in state.items():
            if not is_finite(entries["momentum_buffer"]):
                raise CheckpointError(
                    f"muon.{name}.momentum_buffer has NaN or infinite values; {REMEDY}"
                )
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
    """The matrix, transposed if it has more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _like(parameter: nn.Parameter, wide: Tensor) -> Tensor:
    """The inverse of `_wide` for this parameter."""
    return wide.T.contiguous() if parameter.shape[0] > parameter.shape[1] else wide
