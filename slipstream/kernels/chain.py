"""A whole draft in one call: the head catches up with the policy, a token is drawn from its
feature, both are fed back, and so on.

Of the tokens that it catches up with only keys and values are computed, but for the last of each
sequence. The parts of the other files in a row, as in `layers`: with several sequences each thread
drafts for its own.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draw import draw_part
from slipstream.kernels.layers import WEIGHTS, layers_part, place_sized, room_from
from slipstream.kernels.memory import floats_at, ints_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.product import product_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait

TAKEN_IN = 512
"""Tokens that are taken in at once: what they leave behind stays in the cache."""

_SEQUENCES_FROM = 128
"""Threads take sequences of their own from one each to so many numbers of a feature on."""


@kernel
def join(embedding, ids, features, both, M, D, part, parts):
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
def take_in(
    spots, E, begin, end, most, embedding, fc, fc_start, weights, eps, both, x, qkv, cos, sin,
    head_stride, keys, values, D, Q, H, K, size, part, parts,
):  # fmt: skip
    """Keys and values of some of E tokens whose own predictions nobody asks for, `most` at a time:
    the rest of the layer is left out."""
    table = carray(ints_at(weights), (WEIGHTS,))
    panels, start, norms = table[1] + size * Q * K * D, table[2] + 4 * Q * K, table[3]
    if norms:
        norms += 4 * Q * K
    while begin < end:
        rows, at = min(most, end - begin), spots + 8 * begin
        join(embedding, at + 8 * E, at, both, rows, D, part, parts)
        wait(parts)
        product_part(both, fc, fc_start, x, rows, D, 2 * D, size, part, parts)
        wait(parts)
        product_part(x, panels, start, qkv, rows, 2 * H * K, D, size, part, parts)
        wait(parts)
        placed = (
            qkv, norms, eps, cos, sin, at + 16 * E, 0, keys, values, at + 24 * E, head_stride,
            rows, 0, H, K,
        )  # fmt: skip
        place_sized(size, placed, part, parts)
        wait(parts)
        begin += rows


@kernel
def lay_out(given, drawn_at, spots, E, normed, limit, head_stride, N, D, H, K):
    """`spots` from what is `given`."""
    counts = carray(ints_at(given), (N,))
    cached = carray(ints_at(given + 8 * N), (N,))
    ids = carray(ints_at(given + 16 * N), (E + N,))
    features = carray(ints_at(given + 16 * N + 8 * (E + N)), (E + N,))
    positions = carray(ints_at(drawn_at), (N,))
    early = carray(ints_at(spots), (4, E))
    last = carray(ints_at(spots + 32 * E), (6, N))
    drafted = carray(ints_at(spots + 32 * E + 48 * N), (6, N))
    t = e = 0
    for n in range(N):
        first, end = n * H * head_stride, cached[n] + counts[n]
        for slot in range(cached[n], end - 1):
            early[0, e], early[1, e] = features[t], ids[t]
            early[2, e], early[3, e] = min(slot, limit), first + slot * K
            t, e = t + 1, e + 1
        last[0, n], last[5, n] = features[t], ids[t]
        last[1, n], last[2, n] = min(end - 1, limit), first + (end - 1) * K
        drafted[0, n], drafted[5, n] = normed + 4 * n * D, positions[n]
        drafted[1, n], drafted[2, n] = min(end, limit), first + end * K
        last[3, n] = drafted[3, n] = first
        last[4, n], drafted[4, n] = end, end + 1
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


@kernel
def _chain(
    given, drawn_at, spots, E, embedding, fc, fc_start, lm_head, lm_start, V, padded,
    keys_N2, temperatures, tokens, steps,
    weights, eps, logits, both, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    cos, sin, limit, head_stride, longest, keys, values, N, D, Q, H, K, W, size, part, parts,
):  # fmt: skip
    if part == 0:
        lay_out(given, drawn_at, spots, E, normed, limit, head_stride, N, D, H, K)
    wait(parts)
    first, n, early, earlies, most, m, part, parts = share(given, E, N, D, 1, part, parts)
    both, x = both + 8 * D * m, x + 4 * D * m
    spare, delta, qkv, q, mixed, gates, gated = room_from(
        m, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size
    )
    normed, logits = normed + 4 * D * first, logits + 4 * padded * first
    keys_N2, tokens = keys_N2 + 8 * first, tokens + 8 * first
    temperatures += 4 * first
    take_in(
        spots, E, early, earlies, most, embedding, fc, fc_start, weights, eps, both, x, qkv, cos,
        sin, head_stride, keys, values, D, Q, H, K, size, part, parts,
    )  # fmt: skip
    begin, end = n * part // parts, n * (part + 1) // parts
    heat = carray(floats_at(temperatures), (n,))
    # Of the last tokens, then of those that are drafted: feature, place, own, first, seen, and the
    # token or the position that it is drawn for.
    now = spots + 32 * E + 8 * first
    words, later = now + 40 * N, now + 48 * N
    positions = later + 40 * N
    places, slots = carray(ints_at(later + 8 * N), (n,)), carray(ints_at(later + 16 * N), (n,))
    counts, at = carray(ints_at(later + 32 * N), (n,)), carray(ints_at(positions), (n,))
    for step in range(steps):
        join(embedding, words, now, both, n, D, part, parts)
        wait(parts)
        product_part(both, fc, fc_start, x, n, D, 2 * D, size, part, parts)
        wait(parts)
        layers_part(
            weights, 1, 0, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated, cos, sin,
            now + 8 * N, now + 16 * N, now + 24 * N, now + 32 * N, 0, 0,
            head_stride, longest, keys, values, 0, 0, 0, 0, 0, 0,
            n, D, Q, H, K, W, size, part, parts,
        )  # fmt: skip
        wait(parts)
        now, words = later, tokens + step * N * 8
        product_part(normed, lm_head, lm_start, logits, n, padded, D, size, part, parts)
        wait(parts)
        for i in range(begin, end):
            t = heat[i]
            if t != ZERO:
                row = carray(floats_at(logits + i * padded * 4), (V,))
                for j in range(V):
                    row[j] = row[j] / t
        draw_part(
            logits, padded, keys_N2, positions, temperatures, 0, words, n, V, part, parts
        )  # fmt: skip
        for i in range(begin, end):
            at[i] += 1
            if step:
                places[i] = min(places[i] + 1, limit)
                slots[i] += K
                counts[i] += 1
        wait(parts)


@for_team
def _chain_shared(p):
    _chain(*to_fixed_tuple(carray(p, (42,)), 42), part_number(), part_count())


def chain(*arguments: int, work: int) -> None:
    """Take in new tokens of N sequences, then draft `steps` tokens for each. In this order:

    given: int64, the counts (N,) of new tokens of each sequence, at least one, and of those that it
    has cached; the new tokens, E + N of them, sequence by sequence, and the addresses of the
    features (D,) before them; drawn_at: the positions (N,) that the first tokens are drawn for;
    spots: room for `chain_numbers` int64 numbers; E;
    embedding (V, D); fc, fc_start: packed, 2D to D; lm_head, lm_start: packed, `padded` outputs, of
    which V are tokens; V; padded; keys_N2, temperatures: as in `draw`;
    tokens (steps, N) int64: the result; steps;
    weights, eps: as in `layers`, of one layer; room: logits (N, padded), both (R, 2D), x (R, D),
    and as in `layers` for R rows, R = `most_rows(N, E)`;
    cos, sin: tables; limit: their last row; head_stride, longest, keys, values: as in `attend`;
    N, D, Q, H, K, W; size: as in `layers`.

    `spots` will hold, one after the other: of the E new tokens that are not the last of their
    sequence the address of the feature before them, themselves, the place in the rotation tables,
    `own` as in `attend`; of the last ones (N each) the address of the feature, place, own, first,
    seen as in `attend`, and themselves; of the tokens that are drafted the addresses of the rows of
    `normed`, place, own, first, seen of the first one, and the position that it is drawn for.
    """
    run(_chain, _chain_shared, arguments, work)


def most_rows(sequences: int, early: int) -> int:
    """Rows that `chain` computes at once, by all threads together."""
    return sequences + min(early, TAKEN_IN)


def chain_numbers(sequences: int, early: int) -> int:
    """Numbers that `chain` needs room for, to say where everything is."""
    return 4 * early + 12 * sequences
