"""Matrix products with packed weights: kernels whose every output is one chain of fused
multiply-adds over the inputs in order, whatever the number of rows.

A weight (N, K) is packed into panels of 16 outputs, [panel][input][output], the last one filled up
with zeros, for `tile` (the scheme of Goto and van de Geijn 2008). Every argument is an address or a
size.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at
from slipstream.kernels.numeric import ZERO
from slipstream.kernels.team import for_team, part_count, part_number, run
from slipstream.kernels.tile import PANEL, tile_1x2, tile_2x2, tiles

_AHEAD = 16384
"""Bytes that the weights of a single tile are asked for in advance: a processor's own guesses are
too short for memory that several rows keep busy. Single rows gain nothing."""

_BLOCK = 96
"""Rows whose inputs stay in the cache while panels go by."""


@kernel
def product_part(x, panels, bias, out, M, N, K, part, parts):
    """See `product`; one of `parts` parts."""
    x_step, panel_step, out_step = 4 * K, 4 * PANEL * K, 4 * N
    total = N // PANEL
    begin, end = total * part // parts, total * (part + 1) // parts
    if 1 <= M <= 2:
        p = begin
        while p + 2 <= end:
            w, b, o = panels + p * panel_step, bias + 4 * PANEL * p, out + 4 * PANEL * p
            if M == 1:
                tile_1x2(x, x_step, w, 4 * PANEL, panel_step, K, b, o, out_step, w + _AHEAD, 64)
            else:
                tile_2x2(x, x_step, w, 4 * PANEL, panel_step, K, b, o, out_step, w + _AHEAD, 64)
            p += 2
        begin = p
    block = 0
    while block < M:
        rows = min(_BLOCK, M - block)
        for p in range(begin, end):
            w, b = panels + p * panel_step, bias + 4 * PANEL * p
            o = out + block * out_step + 4 * PANEL * p
            # Several tiles ask for the next panel, so that memory is read at an even pace.
            ask = w + _AHEAD if rows <= 6 else panels + min(p + 1, total - 1) * panel_step
            tiles(x + block * x_step, x_step, w, 4 * PANEL, K, b, o, out_step, rows, ask, 4 * PANEL)
        block += rows


@for_team
def _product_shared(p):
    product_part(*to_fixed_tuple(carray(p, (7,)), 7), part_number(), part_count())


def product(x: int, panels: int, bias: int, out: int, M: int, N: int, K: int) -> None:
    """out (M, N) = x (M, K) W^T + bias; N a multiple of 16, `bias` N numbers."""
    run(product_part, _product_shared, (x, panels, bias, out, M, N, K), (M + 3) * N * K // 8)


@kernel
def _pack(weight, panels, N, K, part, parts):
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
    _pack(*to_fixed_tuple(carray(p, (4,)), 4), part_number(), part_count())


def pack(weight: int, panels: int, N: int, K: int) -> None:
    """A weight (N, K) into panels."""
    run(_pack, _pack_shared, (weight, panels, N, K), N * K)
