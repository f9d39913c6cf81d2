"""The tokens of each row with the largest scores + keyed Gumbel noise, in order.

As `draw`, which finds the first of them: a token whose noise cannot bring it among the best so far
is passed over without its logarithms.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import ALL, GOLDEN, SLACK, STEP, U, mix
from slipstream.kernels.memory import floats_at, ints_at, words_at
from slipstream.kernels.numeric import F, exp, largest

_8 = U(8)


@kernel
def _put_in(best, ids, score, token):
    """Among those in order of score, before the first that is smaller."""
    i = len(best) - 1
    if not score > best[i]:
        return
    while i > 0 and score > best[i - 1]:
        best[i], ids[i] = best[i - 1], ids[i - 1]
        i -= 1
    best[i], ids[i] = score, token


@kernel
def draw_top(scores, key, position, heat, V, best, ids):
    """The `len(ids)` best of V scores at an address (fp32), with the noise of a key (the address of
    its two words) at a position; without noise where `heat` is 0. To `best`, float64, and `ids`;
    the lowest id first among equals. Where there are no more, or the largest score is infinite or
    NaN, -inf and the last id."""
    s, words = carray(floats_at(scores), (V,)), carray(words_at(key), (2,))
    best[:], ids[:] = -np.inf, V - 1
    top = largest(scores, V)
    if not np.isfinite(top):
        return
    if heat == 0:
        for j in range(V):
            _put_in(best, ids, np.float64(s[j]), j)
        return
    first = mix(U(words[0] ^ U(U(position) * GOLDEN)))
    second = mix(U(words[1] + first))
    last = len(best) - 1
    ratio = F(np.inf)
    for j in range(V):
        k = mix(U(mix(U(U(U(j) * GOLDEN) ^ first)) + second))
        # 24 bits, which are a signed number, rounded down: no more than 1 - u.
        below = F(np.int32(U(ALL ^ k) >> _8)) * STEP
        if below <= ratio * exp(s[j] - top) * SLACK:
            u = (np.float64(k) + 0.5) * 2.0**-32
            _put_in(best, ids, np.float64(s[j]) - np.log(-np.log(u)), j)
            if np.isfinite(best[last]):
                ratio = F(np.exp(np.float64(top) - best[last]))


@kernel
def draw_top_rows(scores, stride, keys, positions, temperatures, best, ids, count, N, V):
    """`draw_top` of N rows, `stride` elements apart; arguments as in `draw`, results (N, count)."""
    at = carray(ints_at(positions), (N,))
    heat = carray(floats_at(temperatures), (N,))
    found = np.empty(count, np.float64)
    places = np.empty(count, np.int64)
    values, tokens = carray(floats_at(best), (N, count)), carray(ints_at(ids), (N, count))
    for n in range(N):
        draw_top(scores + 4 * stride * n, keys + 8 * n, at[n], heat[n], V, found, places)
        for i in range(count):
            values[n, i], tokens[n, i] = found[i], places[i]
