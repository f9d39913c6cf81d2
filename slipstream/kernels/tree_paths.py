"""Paths through draft trees: which slots a row of the attention sees.

The nodes of a draft tree are stored in slots in the order of the nodes. A row (query) sees the
slots that all rows of its sequence see, 0 to `stem` - 1. After these it sees the slots on the path
to its own node, in the order of positions; its own slot is the last.

The argument `paths` of the attention kernels is the address of (M, step) int64 numbers. Each row
has its stem, then the slots after the stem, then zeros. If `paths` is 0, each row sees the slots 0
to `seen` - 1. `attend` and `attend_bf16` use this module.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import ints_at


@kernel
def stem_length(paths, step, m):
    """Return the number of leading slots that row m sees, independent of its path."""
    return carray(ints_at(paths + 8 * step * m), (1,))[0]


@kernel
def path_slots(paths, step, m):
    """Return the slots after the stem on the path of row m, padded with zeros."""
    return carray(ints_at(paths + 8 * step * m + 8), (step - 1,))


@kernel
def is_out_of_order(paths, step, m, sees):
    """Return whether row m sees a token that is not in the slot of its position."""
    if not paths:
        return False
    stem = stem_length(paths, step, m)
    # Slots increase along a path, so all are in order if the last one is.
    return sees > stem and path_slots(paths, step, m)[sees - stem - 1] != sees - 1


@kernel
def slots_spanned(paths, step, m, sees):
    """Return the number of slots from 0 to the last one that row m sees."""
    if not paths:
        return sees
    stem = stem_length(paths, step, m)
    return path_slots(paths, step, m)[sees - stem - 1] + 1 if sees > stem else sees


@kernel
def place_nodes(parents, counts, lengths, trees, rows, slots, positions):
    """Compute row, slot and position (int64) of each node of `trees` draft trees.

    The trees follow each other. `counts` are the numbers of nodes; `parents` are indices within a
    tree. The root comes first and is the last of `lengths` tokens. The row of a node is the number
    of its tree. Returns the depth of the deepest node.
    """
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
    """Compute `paths` for the nodes of `place_nodes`, with `step` numbers each.

    `step` is one more than the depth of the deepest node. Shorter paths are padded with 0.
    """
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
