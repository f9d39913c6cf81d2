"""Tiles in the matrix unit of Intel's processors (AMX): rows times panels of bf16, summed in fp32.

One instruction multiplies sixteen rows of sixteen pairs of inputs with those of sixteen outputs. It
takes as long for one row as for sixteen, and twice as long as reading the weights from the second
cache, so that rows are next to free for models that lie further away. Every output is, whatever the
number of rows, a chain over blocks of sixteen pairs in order: the firsts and the seconds of a block
are summed up each by themselves, one fused multiply-add after the other, then together, then added
to what was before; numbers too small for full precision count as zero (Intel's Software Developer's
Manual, TDPBF16PS). Weights lie as for `tile_bf16`. Called by `product` and `attend_bf16` where
`processor.has_matrix_unit`; a thread configures the unit, multiplies, and gives it back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.avx512 import keep, keep_narrow, load
from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import ask_for

ROWS = 16
"""Rows of a tile."""

MOST_ROWS = 2 * ROWS
"""Rows that are multiplied with weights loaded once."""

PAIRS = 16
"""Pairs of inputs of a tile, and outputs."""

_TILE_LINE, _PAIR = 64, 4
"""Bytes of a tile's line, and of a pair."""


def _shapes() -> Any:
    """Configurations of the eight tiles, 64 bytes each: row n for widths that leave n pairs over;
    then the last three tiles are for those (`_one_by_two`)."""
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
    """A compiled function of one instruction over given tiles; its arguments are an address (`a`)
    and a number (`n`)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [_I8] * len(tiles) + [_I8.as_pointer() if a == "a" else _I64 for a in arguments]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}"
        )
        given = [
            builder.inttoptr(value, _I8.as_pointer()) if a == "a" else value
            for a, value in zip(arguments, args, strict=True)
        ]
        builder.call(function, [*(ir.Constant(_I8, tile) for tile in tiles), *given])
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
    """The third tile's weights times the second one's rows, added to the first."""
    return _instruction("tdpbf16ps", (total, rows, weights), "")


_configure_as = _instruction("ldtilecfg", (), "a")

release = _instruction("tilerelease", (), "")
"""Give the unit back, which makes it cheap for the system to stop this thread."""

_zero_0, _zero_1, _zero_2, _zero_3 = (_zero(n) for n in range(4))
_store_0, _store_1, _store_2, _store_3 = (_store(n) for n in range(4))
_load_0, _load_1 = _load(0), _load(1)
_load_2, _load_3, _load_4, _load_5, _load_6, _load_7 = (_load(n) for n in range(2, 8))
_multiply_046, _multiply_147 = _multiply(0, 4, 6), _multiply(1, 4, 7)
_multiply_256, _multiply_357 = _multiply(2, 5, 6), _multiply(3, 5, 7)
_multiply_023, _multiply_124 = _multiply(0, 2, 3), _multiply(1, 2, 4)
_multiply_056, _multiply_157 = _multiply(0, 5, 6), _multiply(1, 5, 7)


@intrinsic
def _round_sixteen(typingctx: Any, x: Any, out: Any) -> Any:
    """Sixteen fp32 numbers at an address to bf16 at another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keep_narrow(builder, load(builder, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add_sixteen(typingctx: Any, a: Any, b: Any, out: Any) -> Any:
    """Sums of sixteen numbers at two addresses to a third."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keep(builder, builder.fadd(load(builder, args[0]), load(builder, args[1])), args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel
def add_rows(sums, start, rows, panels, out, out_step):
    """What the sums of two panels, as `two_panels_amx` gives them with `out_step` 128 and `second`
    64, begin with is added; the first one or two `panels` of each row go to `out`."""
    for _ in range(rows):
        _add_sixteen(sums, start, out)
        if panels > 1:
            _add_sixteen(sums + _TILE_LINE, start + _TILE_LINE, out + _TILE_LINE)
        sums, out = sums + 2 * _TILE_LINE, out + out_step


@kernel
def round_in_sixteens(x, out, count):
    """fp32 to the nearest bf16, for a multiple of sixteen numbers: what is too small for full
    precision becomes zero, which tiles take it for anyway."""
    for i in range(count // ROWS):
        _round_sixteen(x + 4 * ROWS * i, out + 2 * ROWS * i)


@kernel
def configure(pairs):
    """Make the unit ready for rows of so many pairs of inputs, and for those of a multiple of
    `PAIRS`."""
    _configure_as(_SHAPES[pairs % PAIRS].ctypes.data)


@kernel
def _ask(weights, pair_step, panel_step, ahead):
    """For what lies so many bytes from the lines of two tiles; it may be any address."""
    for line in range(PAIRS):
        ask_for(weights + ahead + line * pair_step)
        ask_for(weights + ahead + line * pair_step + panel_step)


@kernel
def _two_by_two(
    x, x_step, weights, pair_step, panel_step, blocks, out, out_step, second, ahead
):  # fmt: skip
    """32 rows, two panels."""
    _zero_0()
    _zero_1()
    _zero_2()
    _zero_3()
    lower, block_step = x + ROWS * x_step, PAIRS * pair_step
    for _ in range(blocks):
        if ahead:
            _ask(weights, pair_step, panel_step, ahead)
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
    """16 rows, two panels; `left` pairs after the last block."""
    _zero_0()
    _zero_1()
    block_step = PAIRS * pair_step
    for _ in range(blocks):
        if ahead:
            _ask(weights, pair_step, panel_step, ahead)
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
    """Two panels of outputs for any number of rows, which are taken in sixteens: beyond the last
    one rows of `x` are read and rows of `out` are written, of no meaning. x: bf16, `x_step` bytes
    from row to row; weights: as in `tile_bf16`, `pair_step` and `panel_step` bytes from a pair and
    a panel to the next; the second panel's outputs go `second` bytes beside the first one's. Memory
    is asked for what lies `ahead` bytes from each weight (0: not). After `configure`."""
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
def more_of_two_panels_amx(
    rows, x, x_step, weights, pair_step, panel_step, pairs, start, out, out_step, second
):
    """As `two_panels_amx`, for a multiple of `PAIRS`, going on from sums at `start`, which lie as
    those at `out` will: what both would be in one call."""
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
