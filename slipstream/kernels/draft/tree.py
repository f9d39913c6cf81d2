"""A whole draft in one call: the head catches up with the policy, tokens are drawn from each
sequence's feature, those that promise most are fed back, and so on. A chain is a tree of one
branch. The parts of the other files in a row, as in `layers`: with several sequences each thread
drafts for its own.

Level by level (EAGLE-2's trees, Li et al. 2024): each of the `topk` nodes that are followed gives
`topk` candidates, and of all candidates of a level the `topk` of the best scores are followed. What
a candidate promises is the share of its exp((score + noise) / scale) among those of the `WIDTH`
best tokens of its row: with the noise that the policy's own choice will be made with, more is known
than how likely the token is (docs/log.md). The scale says how far the scores of the policy are from
those of the head. A node's score is the sum of the logarithms down to it; where it is not worth its
row through the policy, nothing that follows is, and it takes none through the head either.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.draft.prefill import draft_prefill, enter, lay_out, share
from slipstream.kernels.draw_top import draw_top
from slipstream.kernels.layers import layers_part, room_from
from slipstream.kernels.memory import doubles_at, floats_at, hold, ints_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.product import product_part
from slipstream.kernels.rows import add_norm_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait

WIDTH = 8
"""Tokens of a row that are compared, and most that are followed."""

_FIELDS = 10
"""Numbers of a node that is followed: the address of its feature, its place in the rotation tables,
`own`, `first` and `seen` as in `attend`, its token, its number among the candidates, its sequence,
its rank among those that were followed, its score."""


@kernel
def _predict(
    states, spare, last_norm, eps, lm_head, lm_start, logits, M, padded, D, size, part, parts
):  # fmt: skip
    """Logits (M, padded) of states (M, D), by way of `spare` where these are normed first."""
    if last_norm:
        add_norm_part(states, 0, last_norm, eps, 0, spare, M, D, part, parts)
        wait(parts)
        states = spare
    product_part(states, lm_head, lm_start, logits, M, padded, D, size, part, parts)


@kernel
def _draw_rows(
    logits, padded, V, known, Z, keys_N2, temperatures, position, sequences, owners, topk, scale,
    tokens, scores, gaps, begin, end,
):  # fmt: skip
    """Of rows `begin` to `end` of the sequences `owners` (0: a row of each) the `topk` best tokens
    and the logarithms of what they promise, (rows, topk) each; to `gaps`, unless 0, by how much the
    scores of the `WIDTH` best are below the first, (rows, WIDTH)."""
    # Noise goes by token, so a smaller vocabulary is put where its tokens are.
    tokens_of = carray(ints_at(known), (Z if known else 0,))
    spread = np.empty(V if known else 0, np.float32)
    spread[:] = -np.inf
    at = carray(ints_at(position), (sequences,))
    owner = carray(ints_at(owners), (end if owners else 0,))
    heat = carray(floats_at(temperatures), (sequences,))
    best, ids = np.empty(WIDTH, np.float64), np.empty(WIDTH, np.int64)
    for row in range(begin, end):
        n = owner[row] if owners else row
        t = heat[n]
        line = carray(floats_at(logits + row * padded * 4), (Z,))
        if t != ZERO:
            for j in range(Z):
                line[j] = line[j] / t
        scored = logits + row * padded * 4
        if known:
            for j in range(Z):
                spread[tokens_of[j]] = line[j]
            scored = spread.ctypes.data
        draw_top(scored, keys_N2 + 8 * n, at[n], t, V, best, ids)
        mass, some = 0.0, np.isfinite(best[0])
        for i in range(WIDTH):
            gap = best[i] - best[0] if some else -np.inf
            mass += np.exp(gap / scale)
            if gaps:
                carray(doubles_at(gaps + 8 * (WIDTH * row + i)), (1,))[0] = gap
        chosen = carray(ints_at(tokens + 8 * topk * row), (topk,))
        promised = carray(doubles_at(scores + 8 * topk * row), (topk,))
        for i in range(topk):
            chosen[i] = ids[i]
            promised[i] = (best[i] - best[0]) / scale - np.log(mass) if some else -np.inf
    hold(spread)


@kernel
def _record(
    level, topk, followed, rows, begin, end, tokens, scores, out_tokens, out_parents, out
):  # fmt: skip
    """A level's candidates of a sequence, whose rows are `begin` to `end`, to their place among all
    of it."""
    start = topk + (level - 1) * topk * topk if level else 0
    fields = carray(ints_at(followed), (_FIELDS, rows))
    sums = carray(doubles_at(followed + 8 * 9 * rows), (rows,))
    for row in range(begin, end):
        parent, rank, score = (fields[6, row], fields[8, row], sums[row]) if level else (-1, 0, 0.0)
        for j in range(topk):
            i = start + rank * topk + j
            out_tokens[i], out_parents[i] = tokens[row * topk + j], parent
            out[i] = score + scores[row * topk + j]


@kernel
def _follow(
    level, topk, before, followed, rows, begin, end_row, paths, paths_before, depth, n, first, end,
    limit, normed, D, K, out_tokens, out,
):  # fmt: skip
    """The `topk` best candidates of a level of sequence `n`, whose rows were `begin` to `end_row`
    of those that were followed `before`, become the nodes that are `followed`, and have `paths`."""
    start = topk + (level - 1) * topk * topk if level else 0
    count = topk * topk if level else topk
    old = carray(ints_at(before), (_FIELDS, rows))
    new = carray(ints_at(followed), (_FIELDS, rows))
    sums = carray(doubles_at(followed + 8 * 9 * rows), (rows,))
    last = -1
    top = np.inf
    for i in range(topk):
        # The next one in order of scores and, among equals, of numbers.
        found = -1
        for c in range(start, start + count):
            later = out[c] < top or (out[c] == top and c > last)
            if later and (found < 0 or out[c] > out[found]):
                found = c
        last, top = found, out[found]
        row, parent = n * topk + i, begin
        if level:
            # One that is worth following follows a row that was.
            while parent < end_row - 1 and old[8, parent] != (found - start) // topk:
                parent += 1
        slot = end + level * topk + i
        new[0, row] = normed + 4 * D * parent
        new[1, row], new[2, row] = min(end + level, limit), first + slot * K
        new[3, row], new[4, row] = first, end + level + 1
        new[5, row], new[6, row], sums[row] = out_tokens[found], found, out[found]
        new[7, row], new[8, row] = n, i
        path = carray(ints_at(paths + 8 * depth * row), (depth,))
        path[0] = end
        if level:
            above = carray(ints_at(paths_before + 8 * depth * parent), (depth,))
            for j in range(1, level + 1):
                path[j] = above[j]
        path[1 + level] = slot


@kernel
def _grow(
    level, steps, topk, before, following, rows, starts, above, below, depth, given, N, first,
    begin, end, apart, limit, normed, D, K, drawn, promised, tokens, parents, scores,
):  # fmt: skip
    """What was drawn becomes candidates of sequences `begin` to `end` of those from the `first` on,
    and the best of these what is followed."""
    C = topk + (steps - 1) * topk * topk
    ends, begins = carray(ints_at(given), (2, N)), carray(ints_at(starts), (end + 1,))
    level_tokens = carray(ints_at(drawn), (begins[end] * topk,))
    level_scores = carray(doubles_at(promised), (begins[end] * topk,))
    for i in range(begin, end):
        s = 8 * C * (first + i)
        out_tokens = carray(ints_at(tokens + s), (C,))
        out_parents = carray(ints_at(parents + s), (C,))
        out = carray(doubles_at(scores + s), (C,))
        _record(
            level, topk, before, rows, begins[i], begins[i + 1], level_tokens, level_scores,
            out_tokens, out_parents, out,
        )  # fmt: skip
        if level + 1 < steps:
            length = ends[0, first + i] + ends[1, first + i]
            _follow(
                level, topk, before, following, rows, begins[i], begins[i + 1], below, above,
                depth, i, (first + i) * apart, length, limit, normed, D, K, out_tokens, out,
            )  # fmt: skip


@kernel
def _keep(followed, paths, rows, depth, n, topk, floor, starts):
    """Of the nodes that `_follow` chose for `n` sequences, those with a score of at least `floor`,
    without gaps; to `starts` (n + 1,) the first row of each sequence, and how many there are."""
    begins = carray(ints_at(starts), (n + 1,))
    fields = carray(ints_at(followed), (_FIELDS, rows))
    sums = carray(doubles_at(followed + 8 * 9 * rows), (rows,))
    path = carray(ints_at(paths), (rows, depth))
    kept = 0
    for i in range(n):
        begins[i] = kept
        for row in range(i * topk, (i + 1) * topk):
            if not sums[row] >= floor:
                continue
            if kept < row:
                for f in range(_FIELDS):
                    fields[f, kept] = fields[f, row]
                for j in range(depth):
                    path[kept, j] = path[row, j]
            kept += 1
    begins[n] = kept


@kernel
def _tree(
    given, drawn_at, spots, E, embedding, fc, fc_start, lm_head, lm_start, V, padded,
    norm, last_norm, known, Z, keys_N2, temperatures, tokens, parents, scores, steps, topk, judged,
    gaps, weights, eps, logits, wide, both, x, spare, delta, normed, qkv, q, mixed, gates, gated,
    own_rows, cos, sin, limit, head_stride, longest, keys, values, N, D, F, Q, H, K, W, size, part,
    parts,
):  # fmt: skip
    if part == 0:
        lay_out(given, spots, E, limit, head_stride, N, H, K)
    wait(parts)
    C = topk + (steps - 1) * topk * topk
    first, n, early, earlies, most, m, part, parts = share(given, E, N, D, topk, part, parts)
    wide, both, x = wide + 4 * F * m, both + 8 * D * m, x + 4 * D * m
    spare, delta, qkv, q, mixed, gates, gated = room_from(
        m, spare, delta, qkv, q, mixed, gates, gated, D, Q, H, K, W, size
    )
    normed, logits = normed + 4 * D * first * topk, logits + 4 * padded * first * topk
    keys_N2, temperatures = keys_N2 + 8 * first, temperatures + 4 * first
    draft_prefill(
        spots, E, early, earlies, most, embedding, fc, fc_start, norm, weights, eps, wide, both, x,
        qkv, cos, sin, head_stride, keys, values, D, F, Q, H, K, size, part, parts,
    )  # fmt: skip
    now = spots + 32 * E + 8 * first
    features, word, place, own, opens, seen = (
        now, now + 40 * N, now + 8 * N, now + 16 * N, now + 24 * N, now + 32 * N
    )  # fmt: skip
    # After what `lay_out` fills: what is drawn for, the rows of each sequence, tokens and scores of
    # a level, and twice, for they are made of one another, nodes that are followed and their paths.
    positions = spots + 32 * E + 48 * N + 8 * first
    starts = spots + 32 * E + 56 * N + 16 * first
    at, begins = carray(ints_at(positions), (n,)), carray(ints_at(starts), (n + 1,))
    asked = carray(ints_at(drawn_at + 8 * first), (n,))
    depth, rows = steps + 1, n * topk
    drawn = spots + 32 * E + 72 * N + 8 * topk * topk * first
    promised = drawn + 8 * topk * topk * N
    begin = spots + 32 * E + 72 * N + 16 * topk * topk * N
    nodes = begin + 8 * _FIELDS * topk * first
    paths = begin + 16 * _FIELDS * topk * N + 8 * depth * topk * first
    path, path_step, owners = 0, 0, 0
    nodes_apart, paths_apart = 8 * _FIELDS * topk * N, 8 * depth * topk * N
    mine, my_end = n * part // parts, n * (part + 1) // parts
    for i in range(mine, my_end):
        at[i], begins[i] = asked[i], i
        carray(doubles_at(scores + 8 * C * (first + i)), (C,))[:] = -np.inf
    if part == 0:
        begins[n] = n
    floor, scale = carray(doubles_at(judged), (2,))
    M, products_take = n, 0
    if norm:
        products_take = both
    for level in range(steps):
        enter(
            embedding, word, features, level == 0, fc, fc_start, norm, weights, eps, wide, both, x,
            M, D, F, size, part, parts,
        )  # fmt: skip
        wait(parts)
        layers_part(
            weights, 1, 0, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated, cos, sin,
            place, own, opens, seen, path, path_step, head_stride, longest, keys, values, 0,
            0, 0, 0, products_take, 2 * D, own_rows, M, D, Q, H, K, W, size, part, parts,
        )  # fmt: skip
        wait(parts)
        _predict(
            normed, spare, last_norm, eps, lm_head, lm_start, logits, M, padded, D, size, part,
            parts,
        )  # fmt: skip
        wait(parts)
        told = 0 if level else gaps + 8 * WIDTH * first
        _draw_rows(
            logits, padded, V, known, Z, keys_N2, temperatures, positions, n, owners, topk, scale,
            drawn, promised, told, M * part // parts, M * (part + 1) // parts,
        )  # fmt: skip
        wait(parts)
        before, following = nodes + level % 2 * nodes_apart, nodes + (level + 1) % 2 * nodes_apart
        above, below = paths + level % 2 * paths_apart, paths + (level + 1) % 2 * paths_apart
        _grow(
            level, steps, topk, before, following, rows, starts, above, below, depth, given, N,
            first, mine, my_end, H * head_stride, limit, normed, D, K, drawn, promised, tokens,
            parents, scores,
        )  # fmt: skip
        for i in range(mine, my_end):
            at[i] += 1
        if level + 1 == steps:
            break
        wait(parts)
        if part == 0:
            _keep(following, below, rows, depth, n, topk, floor, starts)
        wait(parts)
        M = begins[n]
        if not M:
            break
        features, place, own, opens, seen, word, owners = (
            following, following + 8 * rows, following + 16 * rows, following + 24 * rows,
            following + 32 * rows, following + 40 * rows, following + 56 * rows,
        )  # fmt: skip
        path, path_step = below, depth


@for_team
def _tree_shared(p):
    _tree(*to_fixed_tuple(carray(p, (54,)), 54), part_number(), part_count())


def tree(*arguments: int, work: int) -> None:
    """Take in new tokens of N sequences, then draft a tree for each, `steps` levels deep. In this
    order:

    given: int64, the counts (N,) of new tokens of each sequence, at least one, and of those that it
    has cached; the new tokens, E + N of them, sequence by sequence, and the addresses of the
    features (F,) before them; drawn_at: the positions (N,) that the first tokens are drawn for;
    spots: room for `tree_numbers` int64 numbers; E;
    embedding (V, D); fc, fc_start: packed, 2D, or for EAGLE-3 F, to D; lm_head, lm_start: packed,
    `padded` outputs, of which Z are tokens; V; padded; norm, last_norm: of a state, before the
    layer and before the LM head (0: none, see `draft_prefill`); known: which tokens (Z,) these
    are, int64 (0: all); Z; keys_N2, temperatures: as in `draw`;
    tokens, parents (N, C) int64, scores (N, C) float64: of the C = topk + (steps - 1) topk^2
    candidates of each sequence, level by level, the token, the number of the candidate that it
    follows (-1: none), and the score; -inf, and nothing else of meaning, where it was not gone on;
    steps; topk, at most `WIDTH`; judged: two numbers, float64: a score that what is followed must
    have at least, and the scale; gaps (N, WIDTH) float64, of the first level: by how much the
    scores of the best tokens are below the first;
    weights, eps: as in `layers`, of one layer; room: logits (N topk, padded), wide (R, F; EAGLE-3
    only), both (R, 2D), x (R, D), and as in `layers` for R rows, R = `most_rows(N topk, E)`, but of
    normed (N topk, D);
    cos, sin: tables; limit: their last row; head_stride, longest, keys, values: as in `attend`;
    N, D, F, Q, H, K, W; size: as in `layers`.
    Drafts go to `topk` slots a level but the last, after what is taken in.
    """
    run(_tree, _tree_shared, arguments, work)


def tree_numbers(sequences: int, early: int, steps: int, topk: int) -> int:
    """Numbers that `tree` needs room for, to say where everything is."""
    nodes = 2 * (_FIELDS + steps + 1) * topk
    return 4 * early + sequences * (9 + 2 * topk * topk + nodes)
