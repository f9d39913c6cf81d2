"""Compute the tokens that several sequences begin with once: the prompt of a group's responses.

A forward pass then has a row for each different token instead of each token. Products, norms and
gates run over these rows. Only attention needs the rows of whole sequences, so it gets copies of
the shared ones, and its results for the copies are dropped. The result of a row is the same, bit
for bit, because it does not depend on other rows of a pass (`decoder`).

Shapes: F rows of whole sequences, U rows that are computed (U < F), W width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Pieces = Sequence[tuple[int, int, int]]
"""Consecutive rows: the first among the computed rows, the first among all, and their number."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which rows of concatenated sequences are computed, and which are copies of them."""

    own: Pieces
    """The computed rows."""
    copies: Pieces
    """The rows that are copies of computed ones."""

    @classmethod
    def of(cls, prefixes: Sequence[tuple[Hashable, int]], lengths: Sequence[int]) -> SharedRows:
        """Return the rows of sequences of `lengths`.

        Each has a key of its prefix and the prefix's length. Sequences with equal keys share their
        prefixes, which must be equal.
        """
        own, copies = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        known: dict[Hashable, int] = {}
        computed = begin = 0
        for (key, shared), length in zip(prefixes, lengths, strict=True):
            first = known.setdefault(key, computed)
            copied = shared if first < computed else 0
            if copied:
                copies.append((first, begin, copied))
            if length > copied:
                own.append((computed, begin + copied, length - copied))
            computed += length - copied
            begin += length
        return cls(own, copies)

    @property
    def total(self) -> int:
        """Number of rows of whole sequences."""
        return sum(count for _, _, count in (*self.own, *self.copies))

    def computed_of(self, rows_FW: Tensor) -> Tensor:
        """Return the computed rows, (F, W) -> (U, W). Differentiable."""
        kept: Tensor = _Computed.apply(rows_FW, self)  # type: ignore[no-untyped-call]
        return kept

    def all_of(self, rows_UW: Tensor) -> Tensor:
        """Return the rows of whole sequences, (U, W) -> (F, W). Differentiable."""
        rows: Tensor = _All.apply(rows_UW, self)  # type: ignore[no-untyped-call]
        return rows


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_FW: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return _gathered(rows_FW, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UW: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        grad_FW = grad_UW.new_zeros(shared.total, grad_UW.shape[1])
        for row, place, count in shared.own:
            grad_FW[place : place + count] = grad_UW[row : row + count]
        return grad_FW, None


class _All(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UW: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        rows_FW = rows_UW.new_empty(shared.total, rows_UW.shape[1])
        for row, place, count in (*shared.own, *shared.copies):
            rows_FW[place : place + count] = rows_UW[row : row + count]
        return rows_FW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FW: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        grad_UW = _gathered(grad_FW, shared)
        for row, place, count in shared.copies:
            grad_UW[row : row + count] += grad_FW[place : place + count]
        return grad_UW, None


def _gathered(rows_FW: Tensor, shared: SharedRows) -> Tensor:
    return torch.cat([rows_FW[place : place + count] for _, place, count in shared.own])
