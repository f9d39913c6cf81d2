"""Keyed noise: one fixed Gumbel vector per (sample, position), computed instead of drawn.

The noise of a token is a hash of (key of the sample, absolute position, token id). So the sampled
token does not depend on batch, schedule, preemption or speculation.

    k = hash(key, position, token id) in [0, 2^32)
    u = (k + 1/2) / 2^32                       in float64: in float32 u can round to 1
    G = -log(-log u)                           Gumbel(0, 1)

The integer hash gives the same k on every device. `kernels.draw` implements it, too. It is two
rounds of a 32-bit mixer (xor-shift and multiply, constants of Wellons' `lowbias32`), each keyed
with one word of a 64-bit per-token key. `tests/sampling/test_noise.py` has the statistical tests.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

AT_ONCE = 1 << 24
"""Maximum number of values that a GPU computes at once: 128 MB in float64."""

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)  # the same bits as a signed 32-bit number
_GOLDEN = 0x9E3779B9 - (1 << 32)


def key_words(parts: Sequence[int | str]) -> tuple[int, int]:
    """Return two signed 32-bit words from the parts of a sample's key (the fields of a `NoiseKey`).

    Each part is length-prefixed, so that ("ab", "c") and ("a", "bc") differ. A number and its
    decimal text count as the same part; the type of a field fixes which of them it holds.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    raw = digest.digest()
    return (
        int.from_bytes(raw[:4], "little", signed=True),
        int.from_bytes(raw[4:], "little", signed=True),
    )


def hash_words(keys_N2: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
    """Return k for every token id: int64 (N, V) in [0, 2^32).

    `keys_N2` is int32 (N, 2) from `key_words`. `positions_N` are absolute positions, int (N,).
    """
    return _signed_words(keys_N2, positions_N, vocab_size).to(torch.int64) & 0xFFFFFFFF


def gumbel_noise(keys_N2: Tensor, positions_N: Tensor, ids: int | Tensor) -> Tensor:
    """Return G, float64 (N, V): independent Gumbel(0, 1) values over positions and token ids.

    `ids` are token ids (V,), int64, or the number V of token ids from 0.
    """
    words = _signed_words(keys_N2, positions_N, ids)
    # k - 2^31 is a signed 32-bit number, so float64 represents it exactly without int64.
    k = words.bitwise_xor_(-(1 << 31)).to(torch.float64)
    u = k.add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_()


def _signed_words(keys_N2: Tensor, positions_N: Tensor, ids: int | Tensor) -> Tensor:
    """Return the 32 bits of k for every token id, as int32 (N, V)."""
    positions = positions_N.to(torch.int32)
    first = _mix(keys_N2[:, 0] ^ (positions * _GOLDEN))
    second = _mix(keys_N2[:, 1] + first)
    if isinstance(ids, int):
        ids_V = _scrambled_ids(ids, keys_N2.device)
    else:
        ids_V = ids.to(torch.int32) * _GOLDEN
    return _mix(_mix(ids_V[None, :] ^ first[:, None]).add_(second[:, None]))


@cache
@torch.inference_mode(False)
def _scrambled_ids(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(vocab_size, device=device, dtype=torch.int32) * _GOLDEN


def _mix(x: Tensor) -> Tensor:
    """Apply one round of the mixer to int32 with wrap-around. It is a bijection of 32-bit words.

    Temporaries are reused, because allocating them takes longer than the arithmetic for a large
    vocabulary.
    """
    x = _shift_right(x, 16).bitwise_xor_(x).mul_(_MULTIPLIER_1)
    x = _shift_right(x, 15).bitwise_xor_(x).mul_(_MULTIPLIER_2)
    return _shift_right(x, 16).bitwise_xor_(x)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically. torch shifts int32 arithmetically, so copied sign bits are masked off."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
