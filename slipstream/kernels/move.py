"""Move keys and values of a few tokens to other slots of their cache row, in all layers.

After the verification of a draft tree, the accepted tokens may not be in the slots of their
positions, because slots follow the order of the tree's nodes.
"""

from __future__ import annotations

from numba import carray

from slipstream.kernels.attend import block_offset
from slipstream.kernels.attend_bf16 import copy_value
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, ints_at, words_at
from slipstream.kernels.product import BF16
from slipstream.kernels.tile import PANEL


@kernel
def _copy_bf16_key(keys, source, target_keys, target, K):
    """Copy the key of a slot to a slot of other keys, in the layout of `attend_bf16`."""
    a = carray(words_at(keys + 2 * (source // PANEL * PANEL * K)), (K // 2, PANEL))
    b = carray(words_at(target_keys + 2 * (target // PANEL * PANEL * K)), (K // 2, PANEL))
    for i in range(K // 2):
        b[i, target % PANEL] = a[i, source % PANEL]


@kernel
def _copy_fp32(numbers, source, target_numbers, target, K):
    """Copy K fp32 numbers of a slot to a slot of other numbers."""
    a = carray(floats_at(numbers + 4 * K * source), (K,))
    b = carray(floats_at(target_numbers + 4 * K * target), (K,))
    for i in range(K):
        b[i] = a[i]


@kernel
def move_slots(table, entries, block, layers, heads, K, size, moves, count):
    """Copy keys and values between slots of a KV cache in blocks, in the given order.

    Each row has `entries` int64 numbers in `table`: the absolute offsets, in numbers of `size`
    bytes, of its blocks. A block has (layers, 2, heads, `block`, K) numbers. With 2 bytes they have
    the layout of `attend_bf16`. Each entry of `moves` (count, 3), int64, is a row, a source slot
    and a target slot.
    """
    wanted = carray(ints_at(moves), (count, 3))
    head = block * K * size
    for i in range(count):
        row, source, target = wanted[i]
        of = block_offset(table, row * entries, source // block) * size
        to = block_offset(table, row * entries, target // block) * size
        slot, new = source % block, target % block
        for layer in range(layers):
            for h in range(heads):
                keys = head * (2 * layer * heads + h)
                values = keys + head * heads
                if size == BF16:
                    _copy_bf16_key(of + keys, slot, to + keys, new, K)
                    copy_value(of + values, slot, to + values, new, K)
                else:
                    _copy_fp32(of + keys, slot, to + keys, new, K)
                    _copy_fp32(of + values, slot, to + values, new, K)
