"""Rows that stand on a path through a draft tree: what they see is not one slot after another.

Nodes of a tree lie in slots as they come, and a row sees those on the path to its own node: first
the slots that all rows of its sequence see, 0 to `stem` - 1, then those on its path, in the order
of positions, which is that of slots, its own the last. Given as `paths`, the address of (M, step)
int64 numbers: of each row its stem and the slots after it; 0 where every row sees slots 0 to
`seen` - 1. Used by `attend` and `attend_bf16`.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import ints_at


@kernel
def stem_of(paths, step, m):
    """How many slots from the first one on row m sees, whatever its path."""
    return carray(ints_at(paths + 8 * step * m), (1,))[0]


@kernel
def path_of(paths, step, m):
    """The slots after the stem, as many as row m sees of them."""
    return carray(ints_at(paths + 8 * step * m + 8), (step - 1,))


@kernel
def bends(paths, step, m, sees):
    """Whether a slot that row m sees is not at the place of its position."""
    if not paths:
        return False
    stem = stem_of(paths, step, m)
    # Slots grow along a path: the last one is at its place if all are.
    return sees > stem and path_of(paths, step, m)[sees - stem - 1] != sees - 1


@kernel
def reach_of(paths, step, m, sees):
    """The slots up to the last one that row m sees."""
    if not paths:
        return sees
    stem = stem_of(paths, step, m)
    return path_of(paths, step, m)[sees - stem - 1] + 1 if sees > stem else sees


@kernel
def place_nodes(parents, counts, lengths, trees, rows, slots, positions):
    """Where the nodes of `trees` draft trees stand, one tree after another: the number of the tree,
    the slot, and the position of each, int64. `counts` of nodes, `parents` of each within its tree,
    the root first, which is the last of `lengths` tokens. Returns the depth of the deepest one."""
    count, length = carray(ints_at(counts), (trees,)), carray(ints_at(lengths), (trees,))
    deepest, begin = 0, 0
    for tree in range(trees):
        nodes = count[tree]
        above = carray(ints_at(parents + 8 * begin), (nodes,))
        row = carray(ints_at(rows + 8 * begin), (nodes,))
        slot = carray(ints_at(slots + 8 * begin), (nodes,))
        position = carray(ints_at(positions + 8 * begin), (nodes,))
        first = length[tree] - 1
        for i in range(nodes):
            row[i], slot[i] = tree, first + i
            position[i] = position[above[i]] + 1 if i else first
            deepest = max(deepest, position[i] - first)
        begin += nodes
    return deepest


@kernel
def trace_paths(parents, counts, lengths, trees, paths, step):
    """Their `paths`, `step` numbers each: one more than the deepest is deep. What a path is too
    short for is 0."""
    count, length = carray(ints_at(counts), (trees,)), carray(ints_at(lengths), (trees,))
    begin = 0
    for tree in range(trees):
        nodes = count[tree]
        above = carray(ints_at(parents + 8 * begin), (nodes,))
        path = carray(ints_at(paths + 8 * step * begin), (nodes, step))
        for i in range(nodes):
            path[i, :] = 0
            if i:
                last = 1
                while path[above[i], last]:
                    path[i, last] = path[above[i], last]
                    last += 1
                path[i, last] = length[tree] - 1 + i
            path[i, 0] = length[tree]
        begin += nodes
