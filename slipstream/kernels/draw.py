"""Find the token of each row with the largest score + keyed Gumbel noise.

The noise is that of `sampling.noise`. It is computed only for tokens that can win. With E = -log u,
which is exponential noise, the largest s + G is the smallest E / exp(s). E is at least 1 - u, and
1 - u follows from the hash without a logarithm. So a token is out if 1 - u exceeds the best ratio
so far times exp(s). Of a whole vocabulary, only some tens of tokens need logarithms. All arguments
are addresses or sizes.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import bytes_at, floats_at, ints_at, words_at
from slipstream.kernels.numeric import F, exp, largest
from slipstream.kernels.team import for_team, part_count, part_number, run

U = np.uint32
_MULTIPLIER_1, _MULTIPLIER_2, GOLDEN = U(0x7FEB352D), U(0x846CA68B), U(0x9E3779B9)
_15, _16, _8 = U(15), U(16), U(8)
ALL = U(0xFFFFFFFF)
STEP = F(2.0**-24)
SLACK = F(1.0001)
"""A tolerance larger than the rounding errors of fp32."""
_BLOCK = 128
_NONE = -np.inf


@kernel
def mix(x):
    """Apply one round of the 32-bit mixer of `sampling.noise`."""
    x = U(U(x ^ U(x >> _16)) * _MULTIPLIER_1)
    x = U(U(x ^ U(x >> _15)) * _MULTIPLIER_2)
    return U(x ^ U(x >> _16))


@kernel
def hashes(complements, ids, start, size, first, second):
    """Write the complemented hashes of columns `start` to `start` + `size`. `ids` is as in
    `draw`."""
    if ids:
        own = carray(ints_at(ids + start * 8), (size,))
        for i in range(size):
            complements[i] = ALL ^ mix(U(mix(U(U(U(own[i]) * GOLDEN) ^ first)) + second))
    else:
        for i in range(size):
            complements[i] = ALL ^ mix(U(mix(U(U(U(start + i) * GOLDEN) ^ first)) + second))


@kernel
def draw_part(
    scores, stride, keys, positions, temperatures, support, ids, tokens, N, V, part, parts
):
    """Compute one of `parts` parts of `draw`."""
    words = carray(words_at(keys), (N * 2,))
    at = carray(ints_at(positions), (N,))
    heat = carray(floats_at(temperatures), (N,))
    chosen = carray(ints_at(tokens), (N,))
    weights, complements = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.uint32)
    for n in range(N * part // parts, N * (part + 1) // parts):
        s = carray(floats_at(scores + n * stride * 4), (V,))
        allowed = carray(bytes_at(support + n * V if support else support), (V,))
        top = largest(scores + n * stride * 4, V)
        # With an infinite or NaN logit the token is arbitrary.
        chosen[n] = V - 1
        if not np.isfinite(top):
            continue
        if heat[n] == 0:
            for j in range(V):
                if s[j] == top:
                    chosen[n] = j
                    break
            continue
        first = mix(U(words[2 * n] ^ U(U(at[n]) * GOLDEN)))
        second = mix(U(words[2 * n + 1] + first))
        best, ratio = _NONE, F(np.inf)
        for start in range(0, V, _BLOCK):
            size = min(_BLOCK, V - start)
            near = 0
            hashes(complements, ids, start, size, first, second)
            for i in range(size):
                weights[i] = exp(s[start + i] - top)
                # A lower bound of 1 - u from 24 bits, which fit into a signed number.
                below = F(np.int32(complements[i] >> _8)) * STEP
                near += 1 if below <= ratio * weights[i] * SLACK else 0
            if not near:
                continue
            for i in range(size):
                below = F(np.int32(complements[i] >> _8)) * STEP
                if below <= ratio * weights[i] * SLACK and not (support and not allowed[start + i]):
                    u = (np.float64(ALL ^ complements[i]) + 0.5) * 2.0**-32
                    score = np.float64(s[start + i]) - np.log(-np.log(u))
                    if score > best:
                        best = score
                        chosen[n] = start + i
                        ratio = F(np.exp(np.float64(top) - best))


@for_team
def _draw_shared(p):
    draw_part(*to_fixed_tuple(carray(p, (10,)), 10), part_number(), part_count())


def draw(
    scores: int,
    stride: int,
    keys: int,
    positions: int,
    temperatures: int,
    support: int,
    ids: int,
    tokens: int,
    N: int,
    V: int,
) -> None:
    """Write the index of the largest score + noise of each row to `tokens` (int64).

    There are N rows of V fp32 scores, `stride` elements apart. Among equals the lowest index wins.
    At temperature 0 there is no noise. A row whose largest score is infinite or NaN gets V - 1.

    `keys` (N, 2) int32 and `positions` (N,) int64 are as in `sampling.noise`. `support` (N, V) are
    booleans for the tokens that may be drawn, or 0 for all. Rows at temperature 0 ignore it.
    `ids` (V,) int64 are the token ids of the columns, in ascending order. At address 0, they are 0
    to V - 1.
    """
    run(
        draw_part,
        _draw_shared,
        (scores, stride, keys, positions, temperatures, support, ids, tokens, N, V),
        2 * N * V if N > 1 else 0,
    )
