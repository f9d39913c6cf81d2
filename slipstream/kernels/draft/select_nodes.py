"""Select the candidates of draft trees to verify: those with the best scores of all sequences.

The selected nodes of a tree are in depth-first order, with a node's best child right after it. So
the path with the highest estimated acceptance probability is in consecutive slots, like a chain. It
needs no entry in `paths` of `attend`, and no keys move if this path is accepted.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import doubles_at, ints_at


@kernel
def _threshold(scores, count, least):
    """Return the lowest score of the `count` best, and how many with exactly this score belong.

    Scores below `least` or of -inf do not count.
    """
    eligible = np.empty(len(scores), np.float64)
    n = 0
    for score in scores:
        if score >= least and score > -np.inf:
            eligible[n] = score
            n += 1
    if n <= count:
        return -np.inf, n
    eligible = eligible[:n]
    threshold = np.partition(eligible, n - count)[n - count]
    above = 0
    for score in eligible:
        above += score > threshold
    return threshold, count - above


@kernel
def select_nodes(
    tokens, parents, scores, N, C, drafts, least, out_tokens, out_parents, out_scores, counts,
    left_out,
):  # fmt: skip
    """Select the `drafts` best candidates of all sequences with a score of at least `least`.

    The N sequences have C candidates each: `tokens`, `parents` (int64; -1: the root) and `scores`
    (float64). A parent comes before its children and its score is at least as high. Among equal
    scores the first candidate wins.

    The results go, sequence by sequence, to `out_tokens`, `out_parents` (int64, numbered from 1
    within a sequence, 0 for the root) and `out_scores`. These have room for `drafts` entries or for
    all candidates. `counts` (N,) gets the number for each sequence. `left_out` (N,) gets the token
    that would continue the chain of first children, but is not selected; -1 without such a
    candidate. Returns the total number.
    """
    lines = carray(doubles_at(scores), (N * C,))
    token, parent = carray(ints_at(tokens), (N * C,)), carray(ints_at(parents), (N * C,))
    found, room = carray(ints_at(counts), (N,)), max(min(drafts, N * C), 1)
    next_token = carray(ints_at(left_out), (N,))
    selected = carray(ints_at(out_tokens), (room,))
    above = carray(ints_at(out_parents), (room,))
    score_of = carray(doubles_at(out_scores), (room,))
    threshold, equals = (np.inf, 0) if drafts <= 0 else _threshold(lines, drafts, least)
    # For each node, with the root as the last entry: its first child, its next sibling (-1: none),
    # and its number in depth-first order.
    child, sibling = np.empty(C + 1, np.int64), np.empty(C, np.int64)
    number, is_selected = np.empty(C + 1, np.int64), np.empty(C, np.bool_)
    total = 0
    for n in range(N):
        for i in range(C):
            score = lines[n * C + i]
            is_selected[i] = score >= least and score > threshold
            if score >= least and score == threshold and score > -np.inf and equals > 0:
                is_selected[i] = True
                equals -= 1
        child[:] = -1
        for i in range(C - 1, -1, -1):
            if is_selected[i]:
                p = parent[n * C + i] if parent[n * C + i] >= 0 else C
                sibling[i], child[p] = child[p], i
        # The last node of the chain of selected first children, then its first candidate.
        last = C
        while child[last] >= 0:
            last = child[last]
        next_token[n] = -1
        for i in range(C):
            p = parent[n * C + i] if parent[n * C + i] >= 0 else C
            # A score of -inf belongs to no drafted token.
            if p == last and lines[n * C + i] > -np.inf:
                next_token[n] = token[n * C + i]
                break
        number[C], begin, node = 0, total, child[C]
        while node >= 0:
            p = parent[n * C + node] if parent[n * C + node] >= 0 else C
            selected[total], above[total] = token[n * C + node], number[p]
            score_of[total] = lines[n * C + node]
            total += 1
            number[node] = total - begin
            down = child[node]
            # Go up until there is another sibling.
            while down < 0 and node < C:
                down = sibling[node]
                node = parent[n * C + node] if parent[n * C + node] >= 0 else C
            node = down
        found[n] = total - begin
    return total
