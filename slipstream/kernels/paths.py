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
