"""Matrix products in bf16 by AMX: plain ones, and products fused with the MLP's gate.

Panels are as in `product`. Rows are rounded to bf16, or are bf16 already. `product` and `layers`
use this module on CPUs with AMX. All arguments are addresses or sizes.
"""

from __future__ import annotations

import numpy as np

from slipstream.kernels.avx512 import gate_panel
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import LINE, aligned, hold
from slipstream.kernels.numeric import round_to_bf16
from slipstream.kernels.processor import has_amx
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_amx import (
    MOST_ROWS,
    add_rows,
    configure,
    release,
    round_16_lanes,
    two_panels_amx,
)

USE_AMX = has_amx()
"""Whether AMX multiplies bf16."""

_BLOCK = 256
"""Number of rows whose inputs stay in the cache while a product runs over the panels. With fewer
rows, reading the panels would limit the speed."""

_AHEAD = 4096
"""Bytes by which weights are prefetched in advance."""

ROWS_BEYOND = MOST_ROWS
"""Number of rows that may be read after the last one."""


@kernel
def part_of(total, part, parts):
    """Return the begin and the end of a part's share of `total` items."""
    return total * part // parts, total * (part + 1) // parts


@kernel
def product_amx(x, panels, bias, out, M, N, K, begin, end):
    """Compute panels `begin` to `end` of `product.product` by AMX."""
    rounded = np.empty(LINE + (min(M, _BLOCK) + MOST_ROWS) * 2 * K, np.uint8)
    xs = aligned(rounded.ctypes.data)
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        if K % PANEL:
            round_to_bf16(x + block * 4 * K, xs, rows * K)
        else:
            round_16_lanes(x + block * 4 * K, xs, rows * K)
        _panels(xs, panels, bias, out + block * 4 * N, rows, N, K, begin, end)
        block += rows
    hold(rounded)


@kernel
def bf16_rows_product_part(x, panels, bias, out, M, N, K, part, parts):
    """Compute one of `parts` parts of a product by AMX for rows that are already bf16.

    `ROWS_BEYOND` rows after them must be readable.
    """
    begin, end = part_of(N // PANEL, part, parts)
    block = 0
    while block < M and begin < end:
        rows = min(_BLOCK, M - block)
        o = out + block * 4 * N
        _panels(x + block * 2 * K, panels, bias, o, rows, N, K, begin, end)
        block += rows


@kernel
def _panels(x, panels, bias, out, rows, N, K, begin, end):
    """Compute panels `begin` to `end` for rows in bf16.

    Panels are computed two at a time; the last two may be computed twice.
    """
    panel_step, line, total = 2 * PANEL * K, 4 * PANEL, N // PANEL
    second = panel_step if total > 1 else 0
    sums = np.empty(LINE + MOST_ROWS * 2 * line, np.uint8)
    room = aligned(sums.ctypes.data)
    configure(K // 2)
    p = begin
    while p < end:
        q = max(min(p, total - 2), 0)
        w, ahead = panels + q * panel_step, _AHEAD
        m = 0
        while m < rows:
            some = min(MOST_ROWS, rows - m)
            two_panels_amx(
                some, x + m * 2 * K, 2 * K, w, line, second, K // 2, room, 2 * line, line, ahead
            )
            add_rows(room, bias + line * q, some, total, out + m * 4 * N + line * q, 4 * N)
            m, ahead = m + some, 0
        p += 2
    release()
    hold(sums)


@kernel
def gated_product_part(x, panels, bias, out, M, W, K, part, parts):
    """Compute silu(gate) * up for a product (M, 2W) by AMX, as bf16 rows (M, W).

    This is one of `parts` parts. The values equal those of `product_part` and `rows.gate_part`,
    rounded to bf16. K and W must be multiples of 16.
    """
    begin, end = part_of(W // PANEL, part, parts)
    if begin == end:
        return
    panel_step, line = 2 * PANEL * K, 4 * PANEL
    up_panels, up_bias = W // PANEL * panel_step, 4 * W
    rounded = np.empty(LINE + (min(M, _BLOCK) + MOST_ROWS) * 2 * K, np.uint8)
    sums = np.empty(LINE + MOST_ROWS * 2 * line, np.uint8)
    xs, gates = aligned(rounded.ctypes.data), aligned(sums.ctypes.data)
    ups = gates + MOST_ROWS * line
    configure(K // 2)
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        round_16_lanes(x + block * 4 * K, xs, rows * K)
        for p in range(begin, end):
            w, b, ahead = panels + p * panel_step, bias + line * p, _AHEAD
            m = 0
            while m < rows:
                some = min(MOST_ROWS, rows - m)
                two_panels_amx(
                    some, xs + m * 2 * K, 2 * K, w, line, up_panels, K // 2, gates, line,
                    ups - gates, ahead,
                )  # fmt: skip
                o = out + 2 * ((block + m) * W + PANEL * p)
                gate_panel(gates, ups, b, b + up_bias, o, 2 * W, some)
                m, ahead = m + some, 0
        block += rows
    release()
    hold(rounded)
    hold(sums)
