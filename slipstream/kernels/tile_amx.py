"""AMX tiles: rows times panels of bf16, summed in fp32, on Intel CPUs with AMX.

One instruction multiplies 16 rows of 16 pairs of inputs by the weights of 16 outputs. It takes as
long for one row as for 16, and twice as long as reading the weights from the second-level cache. So
additional rows are almost free for models whose weights come from slower memory.

Every output is a chain over blocks of 16 pairs in order, whatever the number of rows. In a block,
the first inputs of all pairs are summed by fused multiply-adds, and the second inputs likewise.
Both sums are added together and then to the previous sum. Subnormal numbers count as zero (Intel's
Software Developer's Manual, TDPBF16PS). The layout of weights is that of `tile_bf16`.

`product_amx`, `attend_bf16` and `attend_backward_bf16` use this module if `processor.has_amx`. A
thread configures AMX, multiplies, and releases it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.avx512 import load, store, store_bf16
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import prefetch_at

ROWS = 16
"""Number of rows of a tile."""

MOST_ROWS = 2 * ROWS
"""Number of rows that share one load of the weights."""

PAIRS = 16
"""Number of pairs of inputs of a tile. It is also the number of outputs."""

_TILE_LINE, _PAIR = 64, 4
"""Bytes of a row of a tile, and of a pair of bf16."""


def _shapes() -> Any:
    """Return configurations of the eight tiles, 64 bytes each.

    Row n is for inputs with n pairs left after the last whole block. The last three tiles then have
    the shape of that remainder (`_one_by_two`).
    """
    found = np.zeros((PAIRS, 64), np.uint8)
    found[:, 0] = 1
    widths, lines = found[:, 16:32].view(np.uint16), found[:, 48:56]
    widths[:], lines[:] = _TILE_LINE, ROWS
    for left in range(1, PAIRS):
        widths[left, 5] = left * _PAIR
        lines[left, 6:] = left
    return found


_SHAPES = _shapes()

_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _instruction(name: str, tiles: tuple[int, ...], arguments: str) -> Any:
    """Return an intrinsic for one AMX instruction over fixed tiles.

    `arguments` names its further arguments: `a` is an address, `n` a number.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [_I8] * len(tiles) + [_I8.as_pointer() if a == "a" else _I64 for a in arguments]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}"
        )
        values = [
            builder.inttoptr(value, _I8.as_pointer()) if a == "a" else value
            for a, value in zip(arguments, args, strict=True)
        ]
        builder.call(function, [*(ir.Constant(_I8, tile) for tile in tiles), *values])
        return context.get_dummy_value()

    numbers = types.void(*[types.int64] * len(arguments))
    if len(arguments) == 2:

        def two(typingctx: Any, address: Any, step: Any) -> Any:
            return numbers, generate

        return intrinsic(two)
    if len(arguments) == 1:

        def one(typingctx: Any, address: Any) -> Any:
            return numbers, generate

        return intrinsic(one)

    def none(typingctx: Any) -> Any:
        return numbers, generate

    return intrinsic(none)


def _load(tile: int) -> Any:
    return _instruction("tileloadd64", (tile,), "an")


def _store(tile: int) -> Any:
    return _instruction("tilestored64", (tile,), "an")


def _zero(tile: int) -> Any:
    return _instruction("tilezero", (tile,), "")


def _multiply(total: int, rows: int, weights: int) -> Any:
    """Return an intrinsic that adds the product of tiles `rows` and `weights` to tile `total`."""
    return _instruction("tdpbf16ps", (total, rows, weights), "")


_configure_as = _instruction("ldtilecfg", (), "a")

release = _instruction("tilerelease", (), "")
"""Release AMX, so that the system can switch threads without saving tiles."""

_zero_0, _zero_1, _zero_2, _zero_3 = (_zero(n) for n in range(4))
_store_0, _store_1, _store_2, _store_3 = (_store(n) for n in range(4))
_load_0, _load_1 = _load(0), _load(1)
_load_2, _load_3, _load_4, _load_5, _load_6, _load_7 = (_load(n) for n in range(2, 8))
_multiply_046, _multiply_147 = _multiply(0, 4, 6), _multiply(1, 4, 7)
_multiply_256, _multiply_357 = _multiply(2, 5, 6), _multiply(3, 5, 7)
_multiply_023, _multiply_124 = _multiply(0, 2, 3), _multiply(1, 2, 4)
_multiply_056, _multiply_157 = _multiply(0, 5, 6), _multiply(1, 5, 7)


@intrinsic
def _round_16_lanes(typingctx: Any, x: Any, out: Any) -> Any:
    """Round 16 fp32 numbers at an address to bf16 at another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_bf16(builder, load(builder, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add_16_lanes(typingctx: Any, a: Any, b: Any, out: Any) -> Any:
    """Add 16 numbers at two addresses and store the sums at a third."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, builder.fadd(load(builder, args[0]), load(builder, args[1])), args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel
def add_rows(sums, start, rows, panels, out, out_step):
    """Add the initial sums at `start` to the sums of two panels and store them in `out`.

    `sums` are results of `two_panels_amx` with `out_step` 128 and `second` 64. If `panels` is 1,
    only the first panel of each row is stored.
    """
    for _ in range(rows):
        _add_16_lanes(sums, start, out)
        if panels > 1:
            _add_16_lanes(sums + _TILE_LINE, start + _TILE_LINE, out + _TILE_LINE)
        sums, out = sums + 2 * _TILE_LINE, out + out_step


@kernel
def round_16_lanes(x, out, count):
    """Round a multiple of 16 fp32 numbers to the nearest bf16.

    Subnormal numbers become zero. The tiles would treat them as zero anyway.
    """
    for i in range(count // ROWS):
        _round_16_lanes(x + 4 * ROWS * i, out + 2 * ROWS * i)


@kernel
def configure(pairs):
    """Configure AMX for rows of `pairs` pairs of inputs, or of any multiple of `PAIRS`."""
    _configure_as(_SHAPES[pairs % PAIRS].ctypes.data)


@kernel
def _prefetch(weights, pair_step, panel_step, ahead):
    """Prefetch the memory `ahead` bytes after the rows of two weight tiles."""
    for line in range(PAIRS):
        prefetch_at(weights + ahead + line * pair_step)
        prefetch_at(weights + ahead + line * pair_step + panel_step)


@kernel
def _two_by_two(
    x, x_step, weights, pair_step, panel_step, blocks, out, out_step, second, ahead
):  # fmt: skip
    """Multiply 32 rows by two panels."""
    _zero_0()
    _zero_1()
    _zero_2()
    _zero_3()
    lower, block_step = x + ROWS * x_step, PAIRS * pair_step
    for _ in range(blocks):
        if ahead:
            _prefetch(weights, pair_step, panel_step, ahead)
        _load_6(weights, pair_step)
        _load_4(x, x_step)
        _multiply_046()
        _load_7(weights + panel_step, pair_step)
        _multiply_147()
        _load_5(lower, x_step)
        _multiply_256()
        _multiply_357()
        x, lower, weights = x + _TILE_LINE, lower + _TILE_LINE, weights + block_step
    below = out + ROWS * out_step
    _store_0(out, out_step)
    _store_1(out + second, out_step)
    _store_2(below, out_step)
    _store_3(below + second, out_step)


@kernel
def _one_by_two(
    x, x_step, weights, pair_step, panel_step, blocks, left, out, out_step, second, ahead
):  # fmt: skip
    """Multiply 16 rows by two panels; `left` is the number of pairs after the last block."""
    _zero_0()
    _zero_1()
    block_step = PAIRS * pair_step
    for _ in range(blocks):
        if ahead:
            _prefetch(weights, pair_step, panel_step, ahead)
        _load_2(x, x_step)
        _load_3(weights, pair_step)
        _multiply_023()
        _load_4(weights + panel_step, pair_step)
        _multiply_124()
        x, weights = x + _TILE_LINE, weights + block_step
    if left:
        _load_5(x, x_step)
        _load_6(weights, pair_step)
        _multiply_056()
        _load_7(weights + panel_step, pair_step)
        _multiply_157()
    _store_0(out, out_step)
    _store_1(out + second, out_step)


@kernel
def two_panels_amx(
    rows, x, x_step, weights, pair_step, panel_step, pairs, out, out_step, second, ahead
):  # fmt: skip
    """Compute two panels of outputs for any number of rows. Call `configure` first.

    Rows are processed in groups of 16, so the function reads rows of `x` and writes rows of `out`
    past the last one. `x` is bf16 with `x_step` bytes between rows. The weights have the layout of
    `tile_bf16`, with `pair_step` and `panel_step` bytes between pairs and between panels. The
    second panel's outputs are `second` bytes after the first panel's. The memory `ahead` bytes
    after each weight is prefetched (0: none).
    """
    blocks, left = pairs // PAIRS, pairs % PAIRS
    m = 0
    if not left:
        while m + ROWS < rows:
            _two_by_two(
                x + m * x_step, x_step, weights, pair_step, panel_step, blocks,
                out + m * out_step, out_step, second, ahead,
            )  # fmt: skip
            m, ahead = m + MOST_ROWS, 0
    while m < rows:
        _one_by_two(
            x + m * x_step, x_step, weights, pair_step, panel_step, blocks, left,
            out + m * out_step, out_step, second, ahead,
        )  # fmt: skip
        m, ahead = m + ROWS, 0


@kernel
def continue_two_panels_amx(
    rows, x, x_step, weights, pair_step, panel_step, pairs, start, out, out_step, second
):
    """Continue `two_panels_amx` from the sums at `start`, which have the layout of `out`.

    `pairs` must be a multiple of `PAIRS`. The results equal those of a single call over all inputs.
    """
    block_step = PAIRS * pair_step
    for m in range(0, rows, ROWS):
        begin, to, line, row = start + m * out_step, out + m * out_step, weights, x + m * x_step
        _load_0(begin, out_step)
        _load_1(begin + second, out_step)
        for _ in range(pairs // PAIRS):
            _load_2(row, x_step)
            _load_3(line, pair_step)
            _multiply_023()
            _load_4(line + panel_step, pair_step)
            _multiply_124()
            row, line = row + _TILE_LINE, line + block_step
        _store_0(to, out_step)
        _store_1(to + second, out_step)
