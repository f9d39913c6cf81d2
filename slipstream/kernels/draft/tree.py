"""Draft trees for all sequences in one call. A chain is a tree with one branch.

The head first processes the tokens that are new since the last draft (`prefill`). Then it drafts
level by level, as in EAGLE-2 (Li et al. 2024). Each of the `topk` nodes that are followed gives
`topk` candidates. Of all candidates of a level, the `topk` with the best scores are followed in the
next level. If there are enough sequences, each thread drafts for its own ones.

The estimated acceptance probability of a candidate is its share of exp((score + noise) / scale)
among the `WIDTH` best tokens of its row. The noise is the one with which the policy will choose the
token, so the estimate is better than the token's probability alone (docs/log/trees.md). The scale
reflects how far the policy's scores differ from the head's. A node's score is the sum of the log
probabilities on the path from the root. If the score is below the minimum, verifying the node does
not pay, and neither does any node below it. So the head does not follow it.

Shapes: N sequences, M rows (nodes of a level), C candidates of a sequence, Z tokens of the draft
vocabulary, W = `WIDTH`; others as in `prefill` and `layers`.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.attend import slot_offset
from slipstream.kernels.compiling import kernel
from slipstream.kernels.draft.prefill import draft_prefill, lay_out, layer_inputs, share
from slipstream.kernels.draw_top import draw_top
from slipstream.kernels.layers import layers_part, room_from
from slipstream.kernels.memory import doubles_at, floats_at, ints_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.product import product_part
from slipstream.kernels.rows import add_norm_part
from slipstream.kernels.team import for_team, part_count, part_number, run, wait
from slipstream.tree_size import candidate_count

WIDTH = 8
"""Number of best tokens of a row that are compared, and the maximum of `topk`."""

_candidates = kernel(candidate_count)

_FIELDS = 10
"""Number of fields of a followed node: address of its feature, row of the rotation tables, `own`,
`first` and `seen` as in `attend`, token, index among the candidates, sequence, rank among the
followed nodes of its level, score."""


@kernel
def _predict(
    states, spare, last_norm, eps, lm_head, lm_start, logits, M, padded, D, size, part, parts
):  # fmt: skip
    """Compute logits (M, padded) of states (M, D). `spare` is a buffer for normed states."""
    if last_norm:
        add_norm_part(states, 0, last_norm, eps, 0, spare, M, D, part, parts)
        wait(parts)
        states = spare
    product_part(states, lm_head, lm_start, logits, M, padded, D, size, part, parts)


@kernel
def _draw_rows(
    logits, padded, draft_tokens, Z, keys_N2, temperatures, position, sequences, owners, topk,
    scale, tokens, scores, gaps, begin, end,
):  # fmt: skip
    """Draw the `topk` best tokens of rows `begin` to `end`, with their log probabilities.

    Both results are (rows, topk); the probabilities are the estimated acceptance probabilities of
    the module docstring. `owners` are the rows' sequences (0: one row for each sequence). Unless
    `gaps` is 0, it gets the score differences of the `WIDTH` best tokens to the best, (rows,
    WIDTH).
    """
    at = carray(ints_at(position), (sequences,))
    owner = carray(ints_at(owners), (end if owners else 0,))
    temperature = carray(floats_at(temperatures), (sequences,))
    best, ids = np.empty(WIDTH, np.float64), np.empty(WIDTH, np.int64)
    for row in range(begin, end):
        n = owner[row] if owners else row
        t = temperature[n]
        line = carray(floats_at(logits + row * padded * 4), (Z,))
        if t != ZERO:
            for j in range(Z):
                line[j] = line[j] / t
        scored = logits + row * padded * 4
        draw_top(scored, draft_tokens, keys_N2 + 8 * n, at[n], t, Z, best, ids)
        mass, finite = 0.0, np.isfinite(best[0])
        for i in range(WIDTH):
            gap = best[i] - best[0] if finite else -np.inf
            mass += np.exp(gap / scale)
            if gaps:
                carray(doubles_at(gaps + 8 * (WIDTH * row + i)), (1,))[0] = gap
        chosen = carray(ints_at(tokens + 8 * topk * row), (topk,))
        log_probs = carray(doubles_at(scores + 8 * topk * row), (topk,))
        for i in range(topk):
            chosen[i] = ids[i]
            log_probs[i] = (best[i] - best[0]) / scale - np.log(mass) if finite else -np.inf


@kernel
def _record(
    level, topk, followed, rows, begin, end, tokens, scores, out_tokens, out_parents, out
):  # fmt: skip
    """Write a level's candidates of one sequence to the output arrays.

    Rows `begin` to `end` belong to the sequence. The output arrays have room for all candidates
    of it."""
    start = _candidates(level, topk)
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
    limit, table, block, normed, D, K, out_tokens, out,
):  # fmt: skip
    """Choose the nodes of sequence `n` to follow after a level.

    Rows `begin` to `end_row` belong to the sequence. Its `topk` best candidates, which are children
    of those that were followed `before`, become the nodes that are `followed`, and have `paths`."""
    start = _candidates(level, topk)
    count = _candidates(level + 1, topk) - start
    old = carray(ints_at(before), (_FIELDS, rows))
    new = carray(ints_at(followed), (_FIELDS, rows))
    sums = carray(doubles_at(followed + 8 * 9 * rows), (rows,))
    last = -1
    top = np.inf
    for i in range(topk):
        # The next candidate by score and, among equals, by index.
        found = -1
        for c in range(start, start + count):
            later = out[c] < top or (out[c] == top and c > last)
            if later and (found < 0 or out[c] > out[found]):
                found = c
        last, top = found, out[found]
        row, parent = n * topk + i, begin
        if level:
            # A candidate with a sufficient score has a parent that was followed.
            while parent < end_row - 1 and old[8, parent] != (found - start) // topk:
                parent += 1
        slot = end + level * topk + i
        new[0, row] = normed + 4 * D * parent
        new[1, row] = min(end + level, limit)
        new[2, row] = slot_offset(table, first, block, slot, K)
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
    begin, end, table, entries, block, limit, normed, D, K, drawn, promised, tokens, parents,
    scores,
):  # fmt: skip
    """Record the candidates of a level and choose the nodes to follow.

    This covers sequences `begin` to `end`, counted from `first`. All drawn tokens are candidates,
    and the best of these what is followed."""
    C = _candidates(steps, topk)
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
                depth, i, (first + i) * entries, length, limit, table, block, normed, D, K,
                out_tokens, out,
            )  # fmt: skip


@kernel
def _keep(followed, paths, rows, depth, n, topk, floor, starts):
    """Keep the nodes of `_follow` with a score of at least `floor`, and close the gaps.

    `starts` (n + 1,) gets the first row of each of the `n` sequences, then the number of nodes.
    """
    begins = carray(ints_at(starts), (n + 1,))
    fields = carray(ints_at(followed), (_FIELDS, rows))
    sums = carray(doubles_at(followed + 8 * 9 * rows), (rows,))
    path = carray(ints_at(paths), (rows, depth))
    count = 0
    for i in range(n):
        begins[i] = count
        for row in range(i * topk, (i + 1) * topk):
            if not sums[row] >= floor:
                continue
            if count < row:
                for f in range(_FIELDS):
                    fields[f, count] = fields[f, row]
                for j in range(depth):
                    path[count, j] = path[row, j]
            count += 1
    begins[n] = count


@kernel
def _tree(
    given, drawn_at, spots, E, embedding, fc, fc_start, lm_head, lm_start, padded, norm,
    last_norm, draft_tokens, Z, keys_N2, temperatures, tokens, parents, scores, steps, topk,
    thresholds, gaps, weights, eps, logits, wide, both, x, spare, delta, normed, qkv, q, mixed,
    gates, gated, own_rows, cos, sin, limit, table, entries, block, head_stride, longest, keys,
    values, N, D, F, Q, H, K, W, size, part, parts,
):  # fmt: skip
    """Compute one of `parts` parts of `tree`."""
    if part == 0:
        lay_out(given, spots, E, limit, table, entries, block, N, K)
    wait(parts)
    C = _candidates(steps, topk)
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
    features, word, place, own, first_slots, seen = (
        now, now + 40 * N, now + 8 * N, now + 16 * N, now + 24 * N, now + 32 * N
    )  # fmt: skip
    # `spots` continues after the part that `lay_out` fills: positions to draw for, first row of
    # each sequence, tokens and scores of a level, followed nodes and their paths. The last two have
    # two buffers each, because a level's nodes are computed from those of the level before.
    positions = spots + 32 * E + 48 * N + 8 * first
    starts = spots + 32 * E + 56 * N + 16 * first
    at, begins = carray(ints_at(positions), (n,)), carray(ints_at(starts), (n + 1,))
    first_positions = carray(ints_at(drawn_at + 8 * first), (n,))
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
        at[i], begins[i] = first_positions[i], i
        carray(doubles_at(scores + 8 * C * (first + i)), (C,))[:] = -np.inf
    if part == 0:
        begins[n] = n
    floor, scale = carray(doubles_at(thresholds), (2,))
    M, qkv_input = n, 0
    if norm:
        qkv_input = both
    for level in range(steps):
        layer_inputs(
            embedding, word, features, level == 0, fc, fc_start, norm, weights, eps, wide, both, x,
            M, D, F, size, part, parts,
        )  # fmt: skip
        wait(parts)
        layers_part(
            weights, 1, 0, eps, x, spare, delta, normed, qkv, q, mixed, gates, gated, cos, sin,
            place, own, first_slots, seen, table, block, path, path_step, head_stride, longest,
            keys, values, 0, 0, 0, 0, qkv_input, 2 * D, own_rows, M, D, Q, H, K, W, size, 0, part,
            parts,
        )  # fmt: skip
        wait(parts)
        _predict(
            normed, spare, last_norm, eps, lm_head, lm_start, logits, M, padded, D, size, part,
            parts,
        )  # fmt: skip
        wait(parts)
        level_gaps = 0 if level else gaps + 8 * WIDTH * first
        _draw_rows(
            logits, padded, draft_tokens, Z, keys_N2, temperatures, positions, n, owners, topk,
            scale, drawn, promised, level_gaps, M * part // parts, M * (part + 1) // parts,
        )  # fmt: skip
        wait(parts)
        before, following = nodes + level % 2 * nodes_apart, nodes + (level + 1) % 2 * nodes_apart
        above, below = paths + level % 2 * paths_apart, paths + (level + 1) % 2 * paths_apart
        _grow(
            level, steps, topk, before, following, rows, starts, above, below, depth, given, N,
            first, mine, my_end, table, entries, block, limit, normed, D, K, drawn, promised,
            tokens, parents, scores,
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
        features, place, own, first_slots, seen, word, owners = (
            following, following + 8 * rows, following + 16 * rows, following + 24 * rows,
            following + 32 * rows, following + 40 * rows, following + 56 * rows,
        )  # fmt: skip
        path, path_step = below, depth


@for_team
def _tree_shared(p):
    _tree(*to_fixed_tuple(carray(p, (56,)), 56), part_number(), part_count())


def tree(*arguments: int, work: int) -> None:
    """Prefill the head with new tokens of N sequences, then draft a tree of `steps` levels each.

    Arguments, in this order:

    given: int64; for each sequence the number of new tokens (at least 1), then for each sequence
    the number of cached tokens; the E + N new tokens, sequence by sequence; the addresses of the
    features (F,) before them; drawn_at: the positions (N,) of the first draft tokens; spots: buffer
    for `tree_numbers` int64 numbers; E;
    embedding (V, D); fc, fc_start: packed, with 2D inputs (EAGLE-3: F) and D outputs; lm_head,
    lm_start: packed, with `padded` outputs, of which Z are tokens; padded; norm, last_norm: of a
    state, before the layer and before the LM head (0: none, see `prefill`); draft_tokens: the draft
    vocabulary (Z,), int64 (0: all tokens); Z; keys_N2, temperatures: as in `draw`;
    tokens, parents (N, C) int64, scores (N, C) float64: of the C = `candidate_count(steps, topk)`
    candidates of each sequence, level by level, the token, the number of the candidate that it
    follows (-1: none), and the score; where a node was not followed, the score of its children is
    -inf, and their token and parent are arbitrary;
    steps; topk, at most `WIDTH`; thresholds: two float64 numbers, the minimum score of a followed
    node and the scale; gaps (N, WIDTH) float64: output, the score differences of the best tokens of
    the first level to the best one;
    weights, eps: as in `layers`, for one layer; buffers: logits (N topk, padded), wide (R, F;
    EAGLE-3 only), both (R, 2D), x (R, D), and the buffers of `layers` for R rows, except normed
    (N topk, D), with R = `most_rows(N topk, E)`;
    cos, sin: tables; limit: their last row; table: as in `attend`, with `entries` numbers for each
    sequence; entries; block, head_stride, longest, keys, values: as in `attend`;
    N, D, F, Q, H, K, W; size: as in `layers`.
    Each level but the last needs `topk` slots of the cache, after the new tokens.
    """
    run(_tree, _tree_shared, arguments, work)


def tree_numbers(sequences: int, early: int, steps: int, topk: int) -> int:
    """Return the size of the buffer `spots` of `tree`, in numbers."""
    nodes = 2 * (_FIELDS + steps + 1) * topk
    return 4 * early + sequences * (9 + 2 * topk * topk + nodes)
