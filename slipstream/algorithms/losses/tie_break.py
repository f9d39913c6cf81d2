"""Tie-break hashes: random choices of tokens that do not depend on their place in the batch.

Trainers compute the hashes of a mini-batch. Losses that select tokens compare them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_hashes(tokens: Tensor, seed: int, row_keys: Tensor | None = None) -> Tensor:
    """Hashes (B, T), int64, of token ids (B, T) that are padded on the right.

    The hash of a token depends on `seed`, on the ids up to it and on its row's key. It does not
    depend on other rows or padding, so it is the same for all micro-batches, orders and ranks.
    `row_keys` (B,) int64, one per sample, distinguish responses with a common prefix; without them
    such prefixes have equal hashes. Use another seed in each step.

    Hash: the finaliser of SplitMix64, https://doi.org/10.1145/2660193.2660195.
    """
    position = torch.arange(tokens.shape[-1], device=tokens.device)
    prefix = _mix(tokens.long() ^ _mix(position)).cumsum(dim=-1)
    start = _mix(torch.tensor(_signed(seed), device=tokens.device))
    if row_keys is not None:
        start = _mix(row_keys.long() ^ start).unsqueeze(-1)
    return _mix(prefix ^ start)


def value_hashes(*values: Tensor) -> Tensor:
    """Hashes (B, T) of the bits of `values` (B, T) and their positions in the row, for callers
    without token ids. Values that differ in one bit have different hashes."""
    hashes = _mix(torch.arange(values[0].shape[-1], device=values[0].device)).expand_as(values[0])
    for value in values:
        # + 0.0 turns -0.0 into 0.0.
        hashes = _mix(hashes ^ (value.detach().double() + 0.0).view(torch.int64))
    return hashes


def ranked(keys: Sequence[Tensor]) -> Tensor:
    """Indices that sort by the first of `keys` (N,), smallest first; later keys break ties."""
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].sort(stable=True).indices]
    return order


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic and fills with the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """An unsigned 64-bit value as a signed one."""
    return (value + 2**63) % 2**64 - 2**63
