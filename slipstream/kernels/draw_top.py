"""The tokens of each row with the largest scores + keyed Gumbel noise, in order.

As `draw`, which finds the first of them: a token whose noise cannot bring it among the best so far
is passed over without its logarithms.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import ALL, GOLDEN, SLACK, STEP, U, mix
from slipstream.kernels.memory import floats_at, words_at
from slipstream.kernels.numeric import F, exp, largest

_8 = U(8)
_BLOCK = 64


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
    # In blocks, most of which hold nothing: what a block's loop computes is vectors.
    rests, weights = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    for start in range(0, V, _BLOCK):
        size = min(_BLOCK, V - start)
        near = 0
        for i in range(size):
            k = mix(U(mix(U(U(U(start + i) * GOLDEN) ^ first)) + second))
            rests[i] = ALL ^ k
            weights[i] = exp(s[start + i] - top)
            # 24 bits, which are a signed number, rounded down: no more than 1 - u.
            below = F(np.int32(rests[i] >> _8)) * STEP
            near += 1 if below <= ratio * weights[i] * SLACK else 0
        if not near:
            continue
        for i in range(size):
            below = F(np.int32(rests[i] >> _8)) * STEP
            if below <= ratio * weights[i] * SLACK:
                u = (np.float64(ALL ^ rests[i]) + 0.5) * 2.0**-32
                _put_in(best, ids, np.float64(s[start + i]) - np.log(-np.log(u)), start + i)
                if np.isfinite(best[last]):
                    ratio = F(np.exp(np.float64(top) - best[last]))
