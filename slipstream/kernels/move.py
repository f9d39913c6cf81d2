"""Keys and values of a few tokens from one slot of their row to another, in all layers.

After a draft tree has been verified, those of its path stand in slots as the nodes came.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.attend_bf16 import value_to
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, ints_at, words_at
from slipstream.kernels.product import BF16
from slipstream.kernels.tile import PANEL


@kernel
def _key_narrow(keys, source, target, K):
    """As keys lie in `attend_bf16`."""
    a = carray(words_at(keys + 2 * (source // PANEL * PANEL * K)), (K // 2, PANEL))
    b = carray(words_at(keys + 2 * (target // PANEL * PANEL * K)), (K // 2, PANEL))
    for i in range(K // 2):
        b[i, target % PANEL] = a[i, source % PANEL]


@kernel
def _wide(numbers, source, target, K):
    a = carray(floats_at(numbers + 4 * K * source), (K,))
    b = carray(floats_at(numbers + 4 * K * target), (K,))
    for i in range(K):
        b[i] = a[i]


@kernel
def move_slots(data, layers, rows, heads, slots, K, size, moves, count):
    """In the store at `data`, (layers, 2, rows, heads, slots, K) numbers of `size` bytes, in the
    given order: `moves` (count, 3) int64 are rows, slots and the slots to copy their keys and
    values to. 2 bytes: they lie as in `attend_bf16`."""
    wanted = carray(ints_at(moves), (count, 3))
    head = slots * K * size
    for layer in range(layers):
        for i in range(count):
            row, source, target = wanted[i]
            for h in range(heads):
                keys = data + head * (((2 * layer) * rows + row) * heads + h)
                values = keys + head * rows * heads
                if size == BF16:
                    _key_narrow(keys, source, target, K)
                    value_to(values, source, values, target, K)
                else:
                    _wide(keys, source, target, K)
                    _wide(values, source, target, K)
