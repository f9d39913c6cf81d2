"""Move keys and values of a few tokens to other slots of their cache row, in all layers.

After the verification of a draft tree, the accepted tokens may not be in the slots of their
positions, because slots follow the order of the tree's nodes.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.attend_bf16 import copy_value
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, ints_at, words_at
from slipstream.kernels.product import BF16
from slipstream.kernels.tile import PANEL


@kernel
def _copy_bf16_key(keys, source, target, K):
    """Copy the key of a slot to another slot, in the layout of `attend_bf16`."""
    a = carray(words_at(keys + 2 * (source // PANEL * PANEL * K)), (K // 2, PANEL))
    b = carray(words_at(keys + 2 * (target // PANEL * PANEL * K)), (K // 2, PANEL))
    for i in range(K // 2):
        b[i, target % PANEL] = a[i, source % PANEL]


@kernel
def _copy_fp32(numbers, source, target, K):
    """Copy K fp32 numbers of a slot to another slot."""
    a = carray(floats_at(numbers + 4 * K * source), (K,))
    b = carray(floats_at(numbers + 4 * K * target), (K,))
    for i in range(K):
        b[i] = a[i]


@kernel
def move_slots(data, layers, rows, heads, slots, K, size, moves, count):
    """Copy keys and values between slots of the KV cache at `data`, in the given order.

    The cache is (layers, 2, rows, heads, slots, K) numbers of `size` bytes. With 2 bytes it has the
    layout of `attend_bf16`. Each entry of `moves` (count, 3), int64, is a row, a source slot and a
    target slot.
    """
    entries = carray(ints_at(moves), (count, 3))
    head = slots * K * size
    for layer in range(layers):
        for i in range(count):
            row, source, target = entries[i]
            for h in range(heads):
                keys = data + head * (((2 * layer) * rows + row) * heads + h)
                values = keys + head * rows * heads
                if size == BF16:
                    _copy_bf16_key(keys, source, target, K)
                    copy_value(values, source, values, target, K)
                else:
                    _copy_fp32(keys, source, target, K)
                    _copy_fp32(values, source, target, K)
