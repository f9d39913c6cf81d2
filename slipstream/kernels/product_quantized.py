"""Matrix products with quantized weights, for drafts. The results need not be exact.

A weight (N, K) is divided into groups of `GROUP` inputs of one output. A group has integers of 4 or
8 bits and a scale s in bf16: weight = s * (integer - zero point), where the zero point is 8 or 128.
The scale is such that the number with the largest absolute value becomes the integer 0.

Layout: [pair of panels][group][scales, then integers of both panels]. The scales are 2 x 16 bf16
numbers. The integers of a panel are [quad][output][4], where a quad is 4 inputs. With 4 bits, the
low halves of the bytes hold one quad and the high halves the next. Rows are rounded to int8 group
by group. All arguments are addresses or sizes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import halves_at, hold, words_at
from slipstream.kernels.numeric import widen
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_quantized import (
    GROUP,
    MOST_ROWS,
    SCALES,
    quantize_row,
    quantize_weights,
    tile_4bit,
    tile_4bit_last,
    tile_8bit,
    tile_8bit_last,
)

_AHEAD = 8192
"""Bytes by which weights are prefetched in advance."""

BF16 = 2
"""Bytes of a weight before it is quantized, if it is bf16."""

_U = np.uint32


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a quantized weight. `inputs` must be a multiple of `GROUP`."""
    pairs = (outputs + 2 * PANEL - 1) // (2 * PANEL)
    return pairs * (inputs // GROUP) * (SCALES + 2 * PANEL * GROUP * bits // 8)


@kernel
def quantized_product_part(x, weights, start, out, M, N, K, bits, part, parts):
    """Compute one of `parts` parts of `quantized_product`."""
    panels, groups = N // PANEL, K // GROUP
    pairs = (panels + 1) // 2
    begin, end = pairs * part // parts, pairs * (part + 1) // parts
    if begin == end:
        return
    # The rows in int8, then the scales of each row, then its zero points.
    memory = np.empty(M * (K + 8 * groups), np.uint8)
    rows = memory.ctypes.data
    scales, scale_step, zeros = rows + M * K, 8 * groups, 4 * groups
    for m in range(M):
        for g in range(groups):
            at = scales + m * scale_step + 4 * g
            quantize_row(
                x + 4 * (m * K + g * GROUP), rows + m * K + g * GROUP, at, at + zeros,
                1 << (bits - 1),
            )  # fmt: skip
    pair_step = groups * (SCALES + 2 * PANEL * GROUP * bits // 8)
    for p in range(begin, end):
        w, s, o = weights + p * pair_step, start + 8 * PANEL * p, out + 8 * PANEL * p
        whole = 2 * p + 2 <= panels
        for m in range(0, M, MOST_ROWS):
            count = min(MOST_ROWS, M - m)
            xm, sm, om = rows + m * K, scales + m * scale_step, o + m * 4 * N
            if bits == 4 and whole:
                tile_4bit(count, xm, K, sm, scale_step, zeros, w, groups, s, om, 4 * N, _AHEAD)
            elif bits == 4:
                tile_4bit_last(count, xm, K, sm, scale_step, zeros, w, groups, s, om, 4 * N, 0)
            elif whole:
                tile_8bit(count, xm, K, sm, scale_step, zeros, w, groups, s, om, 4 * N, _AHEAD)
            else:
                tile_8bit_last(count, xm, K, sm, scale_step, zeros, w, groups, s, om, 4 * N, 0)
    hold(memory)


@for_team
def _product_shared(p):
    quantized_product_part(*to_fixed_tuple(carray(p, (8,)), 8), part_number(), part_count())


def quantized_product(
    x: int, weights: int, start: int, out: int, M: int, N: int, K: int, bits: int
) -> None:
    """Compute out (M, N) = x (M, K) W^T + start.

    N must be a multiple of 16, K a multiple of `GROUP`; `bits` is 4 or 8.
    """
    run(
        quantized_product_part,
        _product_shared,
        (x, weights, start, out, M, N, K, bits),
        (M + 3) * N * K // 32,
    )


@kernel
def _quantize_part(weight, packed, N, K, size, bits, part, parts):
    """Compute one of `parts` parts of `quantize`."""
    pairs, groups = (N + 2 * PANEL - 1) // (2 * PANEL), K // GROUP
    block = SCALES + 2 * PANEL * GROUP * bits // 8
    lines, middle = GROUP * bits // 32, 1 << (bits - 1)
    memory = np.empty(5 * GROUP, np.uint8)
    numbers, integers = memory.ctypes.data, memory.ctypes.data + 4 * GROUP
    words = carray(words_at(integers), (GROUP // 4,))
    for p in range(pairs * part // parts, pairs * (part + 1) // parts):
        for g in range(groups):
            at = packed + (p * groups + g) * block
            out = carray(words_at(at + SCALES), (2, lines, PANEL))
            for j in range(2 * PANEL):
                n, scale, panel, lane = 2 * PANEL * p + j, at + 2 * j, j // PANEL, j % PANEL
                if n >= N:
                    # Outputs that pad the last pair of panels: with a scale of 0 they are 0.
                    carray(halves_at(scale), (1,))[0] = np.uint16(0)
                    for line in range(lines):
                        out[panel, line, lane] = _U(0)
                    continue
                given = weight + size * (n * K + g * GROUP)
                if size == BF16:
                    widen(given, numbers, GROUP)
                    given = numbers
                quantize_weights(given, integers, scale, middle)
                for line in range(lines):
                    if bits == 4:
                        out[panel, line, lane] = words[2 * line] | _U(words[2 * line + 1] << _U(4))
                    else:
                        out[panel, line, lane] = words[line]
    hold(memory)


@for_team
def _quantize_shared(p):
    _quantize_part(*to_fixed_tuple(carray(p, (6,)), 6), part_number(), part_count())


def quantize(weight: int, packed: int, N: int, K: int, size: int, bits: int) -> None:
    """Quantize a weight (N, K) to `packed_bytes` bytes.

    `size` is the bytes of a number of the weight: 4 for fp32, 2 for bf16. `bits` is 4 or 8.
    """
    run(_quantize_part, _quantize_shared, (weight, packed, N, K, size, bits), N * K)
