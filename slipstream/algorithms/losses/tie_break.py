"""Random choices that do not depend on where a token stands: a lot per token, drawn by hashing.

Called by trainers, to draw the lots of a mini-batch, and by the losses that choose tokens. Knows
nothing about what is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_hashes(tokens: Tensor, seed: int, row_keys: Tensor | None = None) -> Tensor:
    """(B, T) int64 lots of (B, T) token ids, padded on the right.

    The lot of a token depends on `seed`, the ids up to it and its row's key, and on no other row,
    nor on padding: micro-batches, orders and ranks draw the same. `row_keys` (B,) int64, one per
    sample, tell apart responses that begin alike; without them their lots are equal so far. Give
    each step another seed.

    Hash: the finaliser of SplitMix64, https://doi.org/10.1145/2660193.2660195.
    """
    position = torch.arange(tokens.shape[-1], device=tokens.device)
    prefix = _mix(tokens.long() ^ _mix(position)).cumsum(dim=-1)
    start = _mix(torch.tensor(_signed(seed), device=tokens.device))
    if row_keys is not None:
        start = _mix(row_keys.long() ^ start).unsqueeze(-1)
    return _mix(prefix ^ start)


def value_hashes(*values: Tensor) -> Tensor:
    """Lots of (B, T) tokens from the bits of `values` and their positions in the row: for callers
    that have no token ids. A value that differs by one bit draws another lot."""
    hashes = _mix(torch.arange(values[0].shape[-1], device=values[0].device)).expand_as(values[0])
    for value in values:
        # + 0.0 makes -0.0 and 0.0 one.
        hashes = _mix(hashes ^ (value.detach().double() + 0.0).view(torch.int64))
    return hashes


def ranked(keys: Sequence[Tensor]) -> Tensor:
    """Indices that sort (N,) `keys`, smallest first, later keys where earlier ones are equal."""
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].sort(stable=True).indices]
    return order


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros, where torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
