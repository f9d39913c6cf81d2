"""What a draft in one call begins with: where everything is, and the head catching up with what the
policy has written since.

Of the tokens that it catches up with only keys and values are computed, but for the last of each
sequence, which is drafted from. Two kinds of heads (`models.draft.eagle1`, `models.draft.eagle3`):

    EAGLE     x = fc([embedding ; feature]), and the layer takes x
    EAGLE-3   x = fc(feature) of a true one, or a state as it is; the layer adds to x, and its
              products take [norm(embedding) ; norm(x)]. `norm` is that of x, 0 for the first kind.

Used by `tree`.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.layers import WEIGHTS, place_sized
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.product import product_part
from slipstream.kernels.rows import add_norm_part
from slipstream.kernels.team import wait

TAKEN_IN = 512
"""Tokens that are taken in at once: what they leave behind stays in the cache."""

_SEQUENCES_FROM = 128
"""Threads take sequences of their own from one each to so many numbers of a feature on."""


@kernel
def _join(embedding, ids, features, both, M, D, part, parts):
    """Embeddings beside features, (M, 2D)."""
    words, rows = carray(ints_at(ids), (M,)), carray(ints_at(features), (M,))
    for m in range(M * part // parts, M * (part + 1) // parts):
        word = carray(floats_at(embedding + words[m] * D * 4), (D,))
        feature = carray(floats_at(rows[m]), (D,))
        joined = carray(floats_at(both + m * D * 8), (2 * D,))
        for i in range(D):
            joined[i] = word[i]
            joined[D + i] = feature[i]


@kernel
def _gather(features, rows, M, F, part, parts):
    """Rows (M, F) from where they are."""
    places = carray(ints_at(features), (M,))
    for m in range(M * part // parts, M * (part + 1) // parts):
        feature = carray(floats_at(places[m]), (F,))
        row = carray(floats_at(rows + m * F * 4), (F,))
        for i in range(F):
            row[i] = feature[i]


@kernel
def enter(
    embedding, ids, features, true, fc, fc_start, norm, layer, eps, wide, both, x, M, D, F, size,
    part, parts,
):  # fmt: skip
    """What the layer begins with, x (M, D), of tokens `ids` and the `features` (F,) or states (D,)
    before them, addresses; `true`: they are the policy's. For EAGLE-3 also what its products take,
    `both` (M, 2D). `layer`: the addresses of its weights. `wide`: room for (M, F) numbers. Nobody
    may read x or `both` before all have come this far."""
    if not norm:
        _join(embedding, ids, features, both, M, D, part, parts)
        wait(parts)
        product_part(both, fc, fc_start, x, M, D, 2 * D, size, part, parts)
        return
    if true:
        _gather(features, wide, M, F, part, parts)
        wait(parts)
        product_part(wide, fc, fc_start, x, M, D, F, size, part, parts)
        wait(parts)
    else:
        _gather(features, x, M, D, part, parts)
    of_word = carray(ints_at(layer), (WEIGHTS,))[0]
    words = carray(ints_at(ids), (M,))
    for m in range(M * part // parts, M * (part + 1) // parts):
        row, word = both + 8 * D * m, embedding + words[m] * D * 4
        add_norm_part(word, 0, of_word, eps, 0, row, 1, D, 0, 1)
        add_norm_part(x + 4 * D * m, 0, norm, eps, 0, row + 4 * D, 1, D, 0, 1)


@kernel
def draft_prefill(
    spots, E, begin, end, most, embedding, fc, fc_start, norm, weights, eps, wide, both, x, qkv,
    cos, sin, head_stride, keys, values, D, F, Q, H, K, size, part, parts,
):  # fmt: skip
    """Keys and values of some of E tokens whose own predictions nobody asks for, `most` at a time:
    the rest of the layer is left out."""
    table = carray(ints_at(weights), (WEIGHTS,))
    given, inputs = (both, 2 * D) if norm else (x, D)
    panels, start, norms = table[1] + size * Q * K * inputs, table[2] + 4 * Q * K, table[3]
    if norms:
        norms += 4 * Q * K
    while begin < end:
        rows, at = min(most, end - begin), spots + 8 * begin
        enter(
            embedding, at + 8 * E, at, True, fc, fc_start, norm, weights, eps, wide, both, x, rows,
            D, F, size, part, parts,
        )  # fmt: skip
        wait(parts)
        product_part(given, panels, start, qkv, rows, 2 * H * K, inputs, size, part, parts)
        wait(parts)
        placed = (
            qkv, norms, eps, cos, sin, at + 16 * E, 0, keys, values, at + 24 * E, head_stride,
            rows, 0, H, K,
        )  # fmt: skip
        place_sized(size, placed, part, parts)
        wait(parts)
        begin += rows


@kernel
def lay_out(given, spots, E, limit, head_stride, N, H, K):
    """`spots` from what is `given`: of the E new tokens that are not the last of their sequence the
    address of the feature before them, themselves, the place in the rotation tables, `own` as in
    `attend`; of the last ones (N each) the address of the feature, place, own, first, seen as in
    `attend`, and themselves."""
    counts = carray(ints_at(given), (N,))
    cached = carray(ints_at(given + 8 * N), (N,))
    ids = carray(ints_at(given + 16 * N), (E + N,))
    features = carray(ints_at(given + 16 * N + 8 * (E + N)), (E + N,))
    early = carray(ints_at(spots), (4, E))
    last = carray(ints_at(spots + 32 * E), (6, N))
    t = e = 0
    for n in range(N):
        first, end = n * H * head_stride, cached[n] + counts[n]
        for slot in range(cached[n], end - 1):
            early[0, e], early[1, e] = features[t], ids[t]
            early[2, e], early[3, e] = min(slot, limit), first + slot * K
            t, e = t + 1, e + 1
        last[0, n], last[5, n] = features[t], ids[t]
        last[1, n], last[2, n] = min(end - 1, limit), first + (end - 1) * K
        last[3, n], last[4, n] = first, end
        t += 1


@kernel
def _early_before(given, first):
    """Of the new tokens, how many that are not the last of their sequence come before one."""
    counts = carray(ints_at(given), (first,))
    found = 0
    for n in range(first):
        found += counts[n] - 1
    return found


@kernel
def share(given, E, N, D, topk, part, parts):
    """Sequences and tokens that this thread takes in and drafts for, with all others or alone: the
    first one and how many, the first and the last token, how many at once, and the first row, where
    a sequence has up to `topk` rows; and which part of how many it is from here on."""
    if parts == 1 or N // parts * _SEQUENCES_FROM < D:
        return 0, N, 0, E, TAKEN_IN, 0, part, parts
    first, n, early, earlies, most, m = 0, 0, 0, 0, max(TAKEN_IN // parts, 1), 0
    for p in range(part + 1):
        m += max(n * topk, min(earlies - early, most))
        first, n = N * p // parts, N * (p + 1) // parts - N * p // parts
        early, earlies = _early_before(given, first), _early_before(given, first + n)
    return first, n, early, earlies, most, m, 0, 1


def most_rows(sequences: int, early: int) -> int:
    """Rows that are computed at once, by all threads together."""
    return sequences + min(early, TAKEN_IN)
