"""Find the tokens of a row with the largest scores + keyed Gumbel noise, in descending order.

`draw` finds only the first of them. As there, a token that cannot be among the best so far is
skipped before its logarithms are computed.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import ALL, GOLDEN, SLACK, STEP, U, mix
from slipstream.kernels.memory import floats_at, ints_at, words_at
from slipstream.kernels.numeric import F, exp, largest

_8 = U(8)
_BLOCK = 64


@kernel
def _insert(best, ids, score, token):
    """Insert a token into the lists sorted by score, before the first smaller score."""
    i = len(best) - 1
    if not score > best[i]:
        return
    while i > 0 and score > best[i - 1]:
        best[i], ids[i] = best[i - 1], ids[i - 1]
        i -= 1
    best[i], ids[i] = score, token


@kernel
def draw_top(scores, tokens, key, position, heat, Z, best, ids):
    """Find the `len(ids)` best of Z fp32 scores at an address, with keyed noise at a position.

    `tokens` is the address of the scores' token ids (Z,), int64 in ascending order, on which the
    noise depends. If it is 0, the ids are 0 to Z - 1. `key` is the address of the key's two words.
    If the temperature `heat` is 0, there is no noise. The results go to `best` (float64) and
    `ids`. Among equals the lowest id comes first. Unused entries, and all entries if the largest
    score is infinite or NaN, are -inf and the last id.
    """
    _draw_top(scores, tokens, key, position, heat, Z, best, ids)
    if tokens:
        token_of = carray(ints_at(tokens), (Z,))
        for i in range(len(ids)):
            ids[i] = token_of[ids[i]]


@kernel
def _draw_top(scores, tokens, key, position, heat, Z, best, ids):
    """`draw_top`, but the results in `ids` are indices of scores."""
    s, words = carray(floats_at(scores), (Z,)), carray(words_at(key), (2,))
    token_of = carray(ints_at(tokens), (Z if tokens else 0,))
    best[:], ids[:] = -np.inf, Z - 1
    top = largest(scores, Z)
    if not np.isfinite(top):
        return
    if heat == 0:
        for j in range(Z):
            _insert(best, ids, np.float64(s[j]), j)
        return
    first = mix(U(words[0] ^ U(U(position) * GOLDEN)))
    second = mix(U(words[1] + first))
    last = len(best) - 1
    ratio = F(np.inf)
    # The first loop over a block is vectorized, and most blocks have no candidate for the second.
    complements, weights = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    words_of_block = np.empty(_BLOCK, np.uint32)
    for start in range(0, Z, _BLOCK):
        size = min(_BLOCK, Z - start)
        near = 0
        if tokens:
            for i in range(size):
                words_of_block[i] = U(token_of[start + i])
        else:
            for i in range(size):
                words_of_block[i] = U(start + i)
        for i in range(size):
            k = mix(U(mix(U(U(words_of_block[i] * GOLDEN) ^ first)) + second))
            complements[i] = ALL ^ k
            weights[i] = exp(s[start + i] - top)
            # A lower bound of 1 - u from 24 bits, which fit into a signed number.
            below = F(np.int32(complements[i] >> _8)) * STEP
            near += 1 if below <= ratio * weights[i] * SLACK else 0
        if not near:
            continue
        for i in range(size):
            below = F(np.int32(complements[i] >> _8)) * STEP
            if below <= ratio * weights[i] * SLACK:
                u = (np.float64(ALL ^ complements[i]) + 0.5) * 2.0**-32
                _insert(best, ids, np.float64(s[start + i]) - np.log(-np.log(u)), start + i)
                if np.isfinite(best[last]):
                    ratio = F(np.exp(np.float64(top) - best[last]))
