"""Matrix products with packed weights.

Every output is one chain of multiply-adds over the inputs in order, whatever the number of rows.

A weight (N, K) is packed into panels of 16 outputs, [panel][input][output], for `tile` (as in Goto
and van de Geijn 2008). The last panel is padded with zeros. In bf16 the layout is
[panel][pair][output][2] with the two inputs of a pair side by side, for `tile_bf16` and
`product_amx`. Rows are then rounded to bf16; sums and results are fp32. All arguments are addresses
or sizes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at, halves_at, hold
from slipstream.kernels.numeric import ZERO, round_to_bf16, widen
from slipstream.kernels.product_amx import USE_AMX, part_of, product_amx
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tile_1x2, tile_2x2, tiles
from slipstream.kernels.tile_bf16 import (
    FEW_ROWS,
    MOST_ROWS,
    WIDE_FROM,
    panels_bf16,
    panels_of_few_rows,
)

_AHEAD = 16384
"""Bytes by which the weights of a single tile are prefetched in advance. The CPU's own prefetcher
does not look far enough ahead if several rows share the weights."""

_TWO_PANELS = 1 << 17
"""If two panels have at most this number of bytes, a tile of two panels prefetches the next two
panels instead. A short distance ahead of the first panel is the second panel, which the tile reads
anyway."""

_BLOCK = 96
"""Number of rows whose inputs stay in the cache while a product runs over the panels."""

FP32, BF16 = 4, 2
"""Bytes of a packed weight of each type."""


@kernel
def product_part(x, panels, bias, out, M, N, K, size, part, parts):
    """Compute one of `parts` parts of `product`."""
    begin, end = part_of(N // PANEL, part, parts)
    product_panels(x, panels, bias, out, M, N, K, size, begin, end)


@kernel
def product_panels(x, panels, bias, out, M, N, K, size, begin, end):
    """Compute the outputs of panels `begin` to `end`. A neighboring panel may be written, too."""
    if begin == end:
        return
    if size == BF16 and USE_AMX:
        product_amx(x, panels, bias, out, M, N, K, begin, end)
    elif size == BF16:
        _bf16(x, panels, bias, out, M, N, K, begin, end)
    else:
        _fp32(x, panels, bias, out, M, N, K, begin, end)


@kernel
def _ahead_of_two(panel_step, otherwise):
    """Return the prefetch distance in bytes of a tile of two panels."""
    return 2 * panel_step if 2 * panel_step <= _TWO_PANELS else otherwise


@kernel
def _fp32(x, panels, bias, out, M, N, K, begin, end):
    """Compute panels `begin` to `end` in fp32."""
    x_step, panel_step, out_step = 4 * K, 4 * PANEL * K, 4 * N
    total = N // PANEL
    if 1 <= M <= 2:
        ahead = _ahead_of_two(panel_step, _AHEAD)
        p = begin
        while p + 2 <= end:
            w, b, o = panels + p * panel_step, bias + 4 * PANEL * p, out + 4 * PANEL * p
            if M == 1:
                tile_1x2(x, x_step, w, 4 * PANEL, panel_step, K, b, 0, o, out_step, w + ahead, 64)
            else:
                tile_2x2(x, x_step, w, 4 * PANEL, panel_step, K, b, 0, o, out_step, w + ahead, 64)
            p += 2
        begin = p
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        for p in range(begin, end):
            w, b = panels + p * panel_step, bias + 4 * PANEL * p
            o = out + block * out_step + 4 * PANEL * p
            # If a panel needs several tiles, they prefetch the next panel at an even pace.
            near = w + _AHEAD if rows <= 6 else panels + min(p + 1, total - 1) * panel_step
            xb = x + block * x_step
            tiles(xb, x_step, w, 4 * PANEL, K, b, 0, o, out_step, rows, near, 4 * PANEL)
        block += rows


@kernel
def _round_in_fp32(x, out, count):
    """Round fp32 numbers to the nearest bf16, stored as fp32."""
    halves = np.empty(count, np.uint16)
    round_to_bf16(x, halves.ctypes.data, count)
    widen(halves.ctypes.data, out, count)
    hold(halves)


@kernel
def _bf16(x, panels, bias, out, M, N, K, begin, end):
    """Compute panels `begin` to `end` in bf16 without AMX."""
    panel_step, out_step, line = 2 * PANEL * K, 4 * N, 4 * PANEL
    pairs = K // 2
    total = N // PANEL
    wide = WIDE_FROM <= M and total > 1
    size = 4 if wide else 2
    x_step = size * K
    rounded = np.empty(min(M, _BLOCK) * x_step, np.uint8)
    xs = rounded.ctypes.data
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        if wide:
            _round_in_fp32(x + block * 4 * K, xs, rows * K)
        else:
            round_to_bf16(x + block * 4 * K, xs, rows * K)
        o = out + block * out_step
        if M <= FEW_ROWS:  # Then this block is the only one.
            begin = panels_of_few_rows(
                xs, x_step, panels, panel_step, begin, end, pairs, bias, o, out_step, M
            )
        # If panels need several tiles, they prefetch the next two panels at an even pace. So do
        # wide tiles, because the CPUs that use them prefetch less themselves.
        next_panels = wide or rows > MOST_ROWS
        ahead = 2 * panel_step if next_panels else _ahead_of_two(panel_step, _AHEAD // 2)
        panels_bf16(
            xs, x_step, panels, line, panel_step, begin, end, total, pairs, bias, line, 0, o,
            out_step, rows, ahead, wide,
        )  # fmt: skip
        block += rows
    hold(rounded)


@for_team
def _product_shared(p):
    product_part(*to_fixed_tuple(carray(p, (8,)), 8), part_number(), part_count())


def product(x: int, panels: int, bias: int, out: int, M: int, N: int, K: int, size: int) -> None:
    """Compute out (M, N) = x (M, K) W^T + bias.

    N must be a multiple of 16, and `bias` has N numbers. `size` is the bytes of a packed weight:
    `FP32` or `BF16`. For `BF16`, K must be even.
    """
    work = (M + 3) * N * K // 8 * size // FP32
    run(product_part, _product_shared, (x, panels, bias, out, M, N, K, size), work)


@kernel
def _pack_bf16(weight, panels, N, K, part, parts):
    """Compute one of `parts` parts of `pack` for bf16."""
    total = (N + PANEL - 1) // PANEL
    for p in range(total * part // parts, total * (part + 1) // parts):
        out = carray(halves_at(panels + p * PANEL * K * 2), (K // 2, PANEL, 2))
        for j in range(PANEL):
            n = p * PANEL + j
            if n < N:
                row = carray(halves_at(weight + n * K * 2), (K // 2, 2))
                for k in range(K // 2):
                    out[k, j, 0] = row[k, 0]
                    out[k, j, 1] = row[k, 1]
            else:
                for k in range(K // 2):
                    out[k, j, 0] = np.uint16(0)
                    out[k, j, 1] = np.uint16(0)


@for_team
def _pack_bf16_shared(p):
    _pack_bf16(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


@kernel
def pack_part(weight, panels, N, K, part, parts):
    """Compute one of `parts` parts of `pack` for fp32."""
    total = (N + PANEL - 1) // PANEL
    for p in range(total * part // parts, total * (part + 1) // parts):
        out = carray(floats_at(panels + p * PANEL * K * 4), (K * PANEL,))
        for j in range(PANEL):
            n = p * PANEL + j
            if n < N:
                row = carray(floats_at(weight + n * K * 4), (K,))
                for k in range(K):
                    out[k * PANEL + j] = row[k]
            else:
                for k in range(K):
                    out[k * PANEL + j] = ZERO


@for_team
def _pack_shared(p):
    pack_part(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


def pack(weight: int, panels: int, N: int, K: int, size: int) -> None:
    """Pack a weight (N, K) into panels of the same type. `size` is `FP32` or `BF16`."""
    whole, shared = (_pack_bf16, _pack_bf16_shared) if size == BF16 else (pack_part, _pack_shared)
    run(whole, shared, (weight, panels, N, K), N * K)
