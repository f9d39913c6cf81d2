"""A whole draft in one call: the head catches up with the policy, a token is drawn from its
feature, both are fed back, and so on.

The parts of the other files in a row, as in `layers`.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import draw_part
from slipstream.kernels.layers import layers_part
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.product import product_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait


@kernel
def _join(embedding, ids, features, both, M, D, part, parts):
    """Embeddings beside features, (M, 2D)."""
    words = carray(ints_at(ids), (M,))
    for m in range(M * part // parts, M * (part + 1) // parts):
        word = carray(floats_at(embedding + words[m] * D * 4), (D,))
        feature = carray(floats_at(features + m * D * 4), (D,))
        joined = carray(floats_at(both + m * D * 8), (2 * D,))
        for i in range(D):
            joined[i] = word[i]
            joined[D + i] = feature[i]


@kernel
def _chain(
    ids, features, T, lasts, spots, embedding, fc, fc_start, lm_head, lm_start, V, padded,
    keys_N2, temperatures, tokens, steps,
    weights, eps, logits, both, hidden, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, limit, head_stride, longest, keys, values, N, D, Q, H, K, W, part, parts,
):  # fmt: skip
    begin, end = N * part // parts, N * (part + 1) // parts
    last, heat = carray(ints_at(lasts), (N,)), carray(floats_at(temperatures), (N,))
    # Rows of `spots`: place, own, first, seen of each new token, then of each sequence.
    rows, spot, later = N * T, spots, spots + 32 * N * T
    places, slots = carray(ints_at(later), (N,)), carray(ints_at(later + 8 * N), (N,))
    counts = carray(ints_at(later + 24 * N), (N,))
    positions = later + 32 * N
    at = carray(ints_at(positions), (N,))
    new, feature = ids, features
    for step in range(steps):
        _join(embedding, new, feature, both, rows, D, part, parts)
        wait(parts)
        product_part(both, fc, fc_start, x, rows, D, 2 * D, part, parts)
        wait(parts)
        layers_part(
            weights, 1, 0, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated, cos, sin,
            spot, spot + 8 * rows, spot + 16 * rows, spot + 24 * rows,
            head_stride, longest, keys, values, 0, rows, D, Q, H, K, W, part, parts,
        )  # fmt: skip
        wait(parts)
        feature = normed
        if step == 0:
            for n in range(begin, end):
                source = carray(floats_at(normed + last[n] * D * 4), (D,))
                target = carray(floats_at(hidden + n * D * 4), (D,))
                for i in range(D):
                    target[i] = source[i]
            wait(parts)
            feature, rows, spot = hidden, N, later
        product_part(feature, lm_head, lm_start, logits, N, padded, D, part, parts)
        wait(parts)
        for n in range(begin, end):
            t = heat[n]
            if t != ZERO:
                row = carray(floats_at(logits + n * padded * 4), (V,))
                for j in range(V):
                    row[j] = row[j] / t
        new = tokens + step * N * 8
        draw_part(
            logits, padded, keys_N2, positions, temperatures, 0, new, N, V, part, parts
        )  # fmt: skip
        for n in range(begin, end):
            at[n] += 1
            if step:
                places[n] = min(places[n] + 1, limit)
                slots[n] += K
                counts[n] += 1
        wait(parts)


@for_team
def _chain_shared(p):
    _chain(*to_fixed_tuple(carray(p, (43,)), 43), part_number(), part_count())


def chain(*arguments: int, work: int) -> None:
    """Take in T new tokens of N sequences, then draft `steps` tokens for each. In this order:

    ids (N, T) int64 and features (N, T, D): the new tokens, each with the feature before it; T;
    lasts (N,): which of the N * T is the last of each; spots: int64 of the new tokens (place in
    the rotation tables, own, first, seen as in `attend`; N * T each), then of the first token that
    is drafted (the same, N each), then the position that it is drawn for, (N,); written over;
    embedding (V, D); fc, fc_start: packed, 2D to D; lm_head, lm_start: packed, `padded` outputs, of
    which V are tokens; V; padded; keys_N2, temperatures: as in `draw`;
    tokens (steps, N) int64: the result; steps;
    weights, eps: as in `layers`, of one layer; room: logits (N, padded), both (N T, 2D),
    hidden (N, D), x (N T, D), and as in `layers` for N T rows;
    cos, sin: tables; limit: their last row; head_stride, longest, keys, values: as in `attend`;
    N, D, Q, H, K, W.
    """
    run(_chain, _chain_shared, arguments, work)
