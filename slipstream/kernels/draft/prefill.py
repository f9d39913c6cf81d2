"""Prefill of a draft head: process the tokens that the policy has written since the last draft.

Drafting starts from the last new token of each sequence. For all earlier new tokens, only keys and
values are computed. There are two kinds of heads (`models.draft.eagle1`, `models.draft.eagle3`):

    EAGLE     x = fc([embedding ; feature]); x is the layer's input
    EAGLE-3   x = fc(feature) of a true feature, or the state itself; x is the residual stream, and
              the q, k and v projections read [norm(embedding) ; norm(x)]. `norm` is the norm of x;
              it is 0 for EAGLE.

`tree` uses this module. Shapes: N sequences, E new tokens that are not the last of their sequence,
D hidden width, F feature width, M rows.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.attend import slot_offset
from slipstream.kernels.compiling import kernel
from slipstream.kernels.layers import WEIGHTS, place_sized
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.product import product_part
from slipstream.kernels.rows import add_norm_part
from slipstream.kernels.team import wait

PREFILL_TOKENS = 512
"""Maximum number of tokens of one prefill pass, so that its buffers stay in the CPU cache."""

_SEQUENCES_FROM = 128
"""Threads draft for their own sequences if each has at least one sequence per this number of
elements of a hidden state."""


@kernel
def _join(embedding, ids, features, both, M, D, part, parts):
    """Concatenate embeddings and features to (M, 2D)."""
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
    """Copy features from their addresses to rows (M, F)."""
    places = carray(ints_at(features), (M,))
    for m in range(M * part // parts, M * (part + 1) // parts):
        feature = carray(floats_at(places[m]), (F,))
        row = carray(floats_at(rows + m * F * 4), (F,))
        for i in range(F):
            row[i] = feature[i]


@kernel
def layer_inputs(
    embedding, ids, features, true, fc, fc_start, norm, layer, eps, wide, both, x, M, D, F, size,
    part, parts,
):  # fmt: skip
    """Compute the layer's input x (M, D) for tokens `ids` with features or states before them.

    `features` are addresses of the policy's features (F,) if `true`, else of states (D,). For
    EAGLE-3 the input `both` (M, 2D) of the q, k and v projections is computed, too. `layer` is the
    address of the layer's weight table. `wide` is a buffer for (M, F) numbers. Call `wait` before
    reading x or `both`.
    """
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
    """Compute keys and values of tokens `begin` to `end` of the E tokens, `most` at a time.

    Their predictions are not needed, so the rest of the layer is skipped.
    """
    table = carray(ints_at(weights), (WEIGHTS,))
    rows_in, inputs = (both, 2 * D) if norm else (x, D)
    panels, start, norms = table[1] + size * Q * K * inputs, table[2] + 4 * Q * K, table[3]
    if norms:
        norms += 4 * Q * K
    while begin < end:
        rows, at = min(most, end - begin), spots + 8 * begin
        layer_inputs(
            embedding, at + 8 * E, at, True, fc, fc_start, norm, weights, eps, wide, both, x, rows,
            D, F, size, part, parts,
        )  # fmt: skip
        wait(parts)
        product_part(rows_in, panels, start, qkv, rows, 2 * H * K, inputs, size, part, parts)
        wait(parts)
        place_arguments = (
            qkv, norms, eps, cos, sin, at + 16 * E, 0, keys, values, at + 24 * E, head_stride,
            rows, 0, H, K,
        )  # fmt: skip
        place_sized(size, place_arguments, part, parts)
        wait(parts)
        begin += rows


@kernel
def lay_out(inputs, spots, E, limit, table, entries, block, N, K):
    """Fill `spots` from `inputs`, both as in `tree.tree`.

    For the E new tokens that are not the last of their sequence, `spots` gets E numbers each of:
    address of the feature before the token, token, row of the rotation tables, `own` as in
    `attend`. For the last tokens it gets N numbers each of: address of the feature, row of the
    tables, `own`, `first` and `seen` as in `attend`, token.
    """
    counts = carray(ints_at(inputs), (N,))
    cached = carray(ints_at(inputs + 8 * N), (N,))
    ids = carray(ints_at(inputs + 16 * N), (E + N,))
    features = carray(ints_at(inputs + 16 * N + 8 * (E + N)), (E + N,))
    early = carray(ints_at(spots), (4, E))
    last = carray(ints_at(spots + 32 * E), (6, N))
    t = e = 0
    for n in range(N):
        first, end = n * entries, cached[n] + counts[n]
        for slot in range(cached[n], end - 1):
            early[0, e], early[1, e] = features[t], ids[t]
            early[2, e] = min(slot, limit)
            early[3, e] = slot_offset(table, first, block, slot, K)
            t, e = t + 1, e + 1
        last[0, n], last[5, n] = features[t], ids[t]
        last[1, n] = min(end - 1, limit)
        last[2, n] = slot_offset(table, first, block, end - 1, K)
        last[3, n], last[4, n] = first, end
        t += 1


@kernel
def _early_before(inputs, first):
    """Return the number of early tokens (not the last of their sequence) before a sequence."""
    counts = carray(ints_at(inputs), (first,))
    found = 0
    for n in range(first):
        found += counts[n] - 1
    return found


@kernel
def share(inputs, E, N, D, topk, part, parts):
    """Return the sequences and tokens for which this thread works.

    If there are enough sequences, each thread works on its own ones; else all threads share all.
    The results are: first sequence, number of sequences, first and end of the early tokens, maximum
    number of tokens of a pass, first buffer row (a sequence has up to `topk` rows), and the part
    and the number of parts that the thread uses from here on.
    """
    if parts == 1 or N // parts * _SEQUENCES_FROM < D:
        return 0, N, 0, E, PREFILL_TOKENS, 0, part, parts
    first, n, early, early_end, most, m = 0, 0, 0, 0, max(PREFILL_TOKENS // parts, 1), 0
    for p in range(part + 1):
        m += max(n * topk, min(early_end - early, most))
        first, n = N * p // parts, N * (p + 1) // parts - N * p // parts
        early, early_end = _early_before(inputs, first), _early_before(inputs, first + n)
    return first, n, early, early_end, most, m, 0, 1


def most_rows(rows: int, early: int) -> int:
    """Return the maximum number of buffer rows that all threads need together.

    `rows` is the number of rows of a tree level, and `early` the number of early tokens.
    """
    return rows + min(early, PREFILL_TOKENS)
