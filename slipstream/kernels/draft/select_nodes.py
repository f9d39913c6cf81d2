"""Which candidates of draft trees are verified, and in which order: those with the best scores of
all sequences, each tree as a walk through it, a node's best child right after it.

So the most promising path of each tree lies in slots in a row, as a chain does: it needs no path of
its own in `attend`, and nothing is moved where it is what is accepted.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import doubles_at, ints_at


@kernel
def _bar(scores, count, least):
    """The score that the `count` best of them have, of those that have `least` and are not -inf;
    and how many of those with just this score are among them."""
    kept = np.empty(len(scores), np.float64)
    n = 0
    for score in scores:
        if score >= least and score > -np.inf:
            kept[n] = score
            n += 1
    if n <= count:
        return -np.inf, n
    kept = kept[:n]
    bar = np.partition(kept, n - count)[n - count]
    above = 0
    for score in kept:
        above += score > bar
    return bar, count - above


@kernel
def select_nodes(
    tokens, parents, scores, N, C, drafts, least, out_tokens, out_parents, out_scores, counts
):  # fmt: skip
    """Of N sequences' C candidates each, `tokens`, `parents` (int64; -1: none) and `scores`
    (float64) at these addresses, the `drafts` best of all sequences together that have a score of
    at least `least`, the first among equals. One after another, sequence by sequence, to
    `out_tokens`, `out_parents` (int64, numbered from 1 on within each sequence, 0 for none) and
    `out_scores`, which have room for `drafts` or for all of them; of each sequence how many to
    `counts` (N,). A score is never above that of the parent, which comes first. Returns how many
    there are."""
    lines = carray(doubles_at(scores), (N * C,))
    token, parent = carray(ints_at(tokens), (N * C,)), carray(ints_at(parents), (N * C,))
    found, lines_of = carray(ints_at(counts), (N,)), max(min(drafts, N * C), 1)
    picked = carray(ints_at(out_tokens), (lines_of,))
    above = carray(ints_at(out_parents), (lines_of,))
    score_of = carray(doubles_at(out_scores), (lines_of,))
    bar, equals = (np.inf, 0) if drafts <= 0 else _bar(lines, drafts, least)
    # Of each node, and of the root at the end: its first child, the one after it among its siblings
    # (-1: none), and its number in the walk.
    child, after = np.empty(C + 1, np.int64), np.empty(C, np.int64)
    number, kept = np.empty(C + 1, np.int64), np.empty(C, np.bool_)
    total = 0
    for n in range(N):
        for i in range(C):
            score = lines[n * C + i]
            kept[i] = score >= least and score > bar
            if score >= least and score == bar and score > -np.inf and equals > 0:
                kept[i] = True
                equals -= 1
        child[:] = -1
        for i in range(C - 1, -1, -1):
            if kept[i]:
                p = parent[n * C + i] if parent[n * C + i] >= 0 else C
                after[i], child[p] = child[p], i
        number[C], begin, node = 0, total, child[C]
        while node >= 0:
            p = parent[n * C + node] if parent[n * C + node] >= 0 else C
            picked[total], above[total] = token[n * C + node], number[p]
            score_of[total] = lines[n * C + node]
            total += 1
            number[node] = total - begin
            down = child[node]
            # Up to where a sibling is left.
            while down < 0 and node < C:
                down = after[node]
                node = parent[n * C + node] if parent[n * C + node] >= 0 else C
            node = down
        found[n] = total - begin
    return total
