"""Register tiles over quantized weights: a few rows times two vectors of weights.

Weights are integers of 4 or 8 bits with one bf16 scale per output and group of `GROUP` inputs
(`product_quantized` has the layout). Rows are int8 with one fp32 scale per group. A group's product
is an exact integer; groups are added in order in fp32. One AVX512_VNNI instruction multiplies and
adds four inputs of 16 outputs; on other CPUs several plain instructions do.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from slipstream.kernels import avx512
from slipstream.kernels.avx512 import REAL, WHOLE
from slipstream.kernels.memory import prefetch
from slipstream.kernels.tile import PANEL

GROUP = 32
"""Number of inputs that share a scale."""

MOST_ROWS = 4
"""Number of rows of the largest tile. More would not fit the vector registers."""

SCALES = 2 * 2 * PANEL
"""Bytes of the scales of a group for two panels."""

_IN_HARDWARE = bool(binding.get_host_cpu_features().get("avx512vnni", False))
_QUAD = 4
_LINE = _QUAD * PANEL
"""Bytes of 16 outputs for four inputs of 8 bits, or for eight inputs of 4 bits."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_QUADS = ir.VectorType(_I8, _LINE) if binding.llvm_version_info >= (22,) else WHOLE
"""The type of the factors of the AVX512_VNNI instruction, which LLVM 22 has changed."""


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _plus(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(_I64, nbytes))


def _broadcast(builder: Any, address: Any, kind: Any, vector: Any) -> Any:
    """Load one number into all lanes of a vector."""
    number = builder.load(_at(builder, address, kind), align=4)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(WHOLE, [0] * PANEL))


def _add_products(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """Return `total` plus the products of four unsigned weights and four signed inputs, per lane.

    All are vectors of 16 32-bit numbers.
    """
    if _IN_HARDWARE:
        name = "llvm.x86.avx512.vpdpbusd.512"
        quads = [builder.bitcast(quad, _QUADS) for quad in (weights, row)]
        return avx512.call(builder, name, WHOLE, total, *quads)
    for index in range(_QUAD):
        up, down = (ir.Constant(WHOLE, [shift] * PANEL) for shift in (24 - 8 * index, 24))
        weight = builder.lshr(builder.shl(weights, up), down)
        number = builder.ashr(builder.shl(row, up), down)
        total = builder.add(total, builder.mul(weight, number))
    return total


def _emit_tile(builder: Any, bits: int, rows: int, panels: int, args: Any) -> None:
    """Emit the code of a tile of `rows` rows and `panels` of a pair of panels.

    `args` are: the address of the int8 rows and the bytes between them; the address of the scales
    of the first row, which the zero points follow, and the bytes between rows; bytes from a row's
    scales to its zero points; the address of the pair of panels; the number of groups; the address
    of the initial sums; the address of out and the bytes between its rows; bytes by which weights
    are prefetched.
    """
    x, x_step, scale, scale_step, zeros, weights, groups, start, out, out_step, ahead = args
    lines = GROUP * bits // 8 // _QUAD
    begin = [avx512.load(builder, _plus(builder, start, 4 * PANEL * p)) for p in range(panels)]
    before = builder.basic_block
    loop, after = builder.append_basic_block("groups"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    sums = [[builder.phi(REAL) for _ in range(panels)] for _ in range(rows)]
    for row in sums:
        for phi, first in zip(row, begin, strict=True):
            phi.add_incoming(first, before)
    block = builder.add(weights, builder.mul(index, ir.Constant(_I64, SCALES + 2 * lines * _LINE)))
    for line in range(1 + 2 * lines):
        prefetch(builder, builder.add(_plus(builder, block, line * _LINE), ahead))
    row_at = _series(builder, builder.add(x, _times(builder, index, GROUP)), x_step, rows)
    scale_at = _series(builder, builder.add(scale, _times(builder, index, 4)), scale_step, rows)
    totals = [
        [_broadcast(builder, builder.add(at, zeros), _I32, WHOLE)] * panels for at in scale_at
    ]
    _add_group(builder, bits, block, row_at, totals)
    done = []
    for place, own, before_it in zip(scale_at, totals, sums, strict=True):
        row_scale = _broadcast(builder, place, ir.FloatType(), REAL)
        new = []
        for p, (whole, total) in enumerate(zip(own, before_it, strict=True)):
            factor = builder.fmul(
                _scales_at(builder, _plus(builder, block, 2 * PANEL * p)), row_scale
            )
            new.append(avx512.fma(builder, builder.sitofp(whole, REAL), factor, total))
        done.append(new)
    following = _plus(builder, index, 1)
    index.add_incoming(following, loop)
    for phi, value in zip(chain(*sums), chain(*done), strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
    builder.position_at_end(after)
    for new in done:
        for p, value in enumerate(new):
            avx512.store(builder, value, _plus(builder, out, 4 * PANEL * p))
        out = builder.add(out, out_step)


def _times(builder: Any, index: Any, nbytes: int) -> Any:
    return builder.mul(index, ir.Constant(_I64, nbytes))


def _series(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    """Return `count` addresses: start, start + step, ..."""
    found = [start]
    while len(found) < count:
        found.append(builder.add(found[-1], step))
    return found


def _scales_at(builder: Any, address: Any) -> Any:
    """Load 16 bf16 numbers as fp32."""
    halves = ir.VectorType(ir.IntType(16), PANEL)
    wide = builder.zext(builder.load(_at(builder, address, halves), align=2), WHOLE)
    return builder.bitcast(builder.shl(wide, ir.Constant(WHOLE, [16] * PANEL)), REAL)


def _add_group(
    builder: Any, bits: int, block: Any, row_at: list[Any], totals: list[list[Any]]
) -> None:
    """Add a group's integer products to the totals of each row and panel."""
    lines = GROUP * bits // 8 // _QUAD
    low = ir.Constant(WHOLE, [0x0F0F0F0F] * PANEL)
    for line in range(lines):
        for quad in range(8 // bits):
            nbytes = _QUAD * (line * 8 // bits + quad)
            inputs = [_broadcast(builder, _plus(builder, at, nbytes), _I32, WHOLE) for at in row_at]
            for p in range(len(totals[0])):
                place = _plus(builder, block, SCALES + (p * lines + line) * _LINE)
                loaded = builder.load(_at(builder, place, WHOLE), align=4)
                if bits == 4:
                    shifts = ir.Constant(WHOLE, [4 * quad] * PANEL)
                    loaded = builder.and_(builder.lshr(loaded, shifts), low)
                for own, row in zip(totals, inputs, strict=True):
                    own[p] = _add_products(builder, own[p], loaded, row)


def _tiles(bits: int, panels: int) -> Any:
    """Return an intrinsic for tiles of 1 to `MOST_ROWS` rows.

    Its arguments are the number of rows and the arguments of `_emit_tile`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [builder.append_basic_block(f"rows{n}") for n in range(1, MOST_ROWS + 1)]
        end = builder.append_basic_block("end")
        choice = builder.switch(args[0], end)
        for rows, block in enumerate(kinds, 1):
            choice.add_case(ir.Constant(_I64, rows), block)
            builder.position_at_end(block)
            _emit_tile(builder, bits, rows, panels, args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def tile(
        typingctx: Any,
        rows: Any,
        x: Any,
        x_step: Any,
        scale: Any,
        scale_step: Any,
        zeros: Any,
        weights: Any,
        groups: Any,
        start: Any,
        out: Any,
        out_step: Any,
        ahead: Any,
    ) -> Any:
        return types.void(*[types.int64] * 12), generate

    return intrinsic(tile)


tile_4bit, tile_4bit_last = _tiles(4, 2), _tiles(4, 1)
tile_8bit, tile_8bit_last = _tiles(8, 2), _tiles(8, 1)


def _splat(builder: Any, number: Any) -> Any:
    """Return a vector with a number in all lanes."""
    undefined = ir.Constant(REAL, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(WHOLE, [0] * PANEL))


def _load_group(builder: Any, x: Any) -> list[Any]:
    """Load `GROUP` fp32 numbers."""
    return [avx512.load(builder, _plus(builder, x, 4 * at)) for at in range(0, GROUP, PANEL)]


def _largest(builder: Any, parts: list[Any]) -> Any:
    """Return the largest number of several vectors."""
    top = parts[0]
    for other in parts[1:]:
        top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
    return avx512.largest(builder, top)


def _store_rounded(builder: Any, parts: list[Any], factor: Any, out: Any) -> list[Any]:
    """Store parts * factor as int8. Return the whole numbers."""
    narrow, found = ir.VectorType(_I8, PANEL), []
    for i, part in enumerate(parts):
        scaled = builder.fmul(part, _splat(builder, factor))
        rounded = avx512.call(builder, "llvm.rint.v16f32", REAL, scaled)
        # Saturating, because the conversion of NaN and infinity is undefined otherwise.
        whole = avx512.call(builder, "llvm.fptosi.sat.v16i32.v16f32", WHOLE, rounded)
        found.append(whole)
        place = _at(builder, _plus(builder, out, i * PANEL), narrow)
        builder.store(builder.trunc(whole, narrow), place, align=1)
    return found


@intrinsic
def quantize_row(typingctx: Any, x: Any, out: Any, scale: Any, zero: Any, middle: Any) -> Any:
    """Round `GROUP` fp32 numbers of a row to int8.

    Writes the scale (fp32), and the sum of the int8 numbers times -`middle` (int32).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, scale, zero, middle = args
        parts, number = _load_group(builder, x), ir.FloatType()
        sizes = [avx512.call(builder, "llvm.fabs.v16f32", REAL, part) for part in parts]
        top = _largest(builder, sizes)
        unit = builder.fmul(top, ir.Constant(number, 1 / 127))
        inverse = _inverse(builder, unit)
        builder.store(unit, _at(builder, scale, number), align=4)
        whole = _store_rounded(builder, parts, inverse, out)
        added = avx512.call(builder, "llvm.vector.reduce.add.v16i32", _I32, builder.add(*whole))
        factor = builder.neg(builder.trunc(middle, _I32))
        builder.store(builder.mul(added, factor), _at(builder, zero, _I32), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _inverse(builder: Any, unit: Any) -> Any:
    """Return 1 / unit, or 0 if the unit is so small that this would be infinite."""
    number = ir.FloatType()
    size = avx512.call(builder, "llvm.fabs.f32", number, unit)
    tiny = builder.fcmp_ordered("<", size, ir.Constant(number, 2.0**-120))
    return builder.select(
        tiny, ir.Constant(number, 0.0), builder.fdiv(ir.Constant(number, 1.0), unit)
    )


@intrinsic
def quantize_weights(typingctx: Any, x: Any, out: Any, scale: Any, middle: Any) -> Any:
    """Round `GROUP` fp32 weights to integers from 0 to 2 * `middle` - 1, one byte each.

    Writes the scale in bf16. The weight with the largest absolute value becomes 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, scale, middle = args
        parts, number = _load_group(builder, x), ir.FloatType()
        top = _largest(builder, parts)
        bottom = _largest(builder, [builder.fneg(part) for part in parts])
        larger = builder.fcmp_ordered(">", top, bottom)
        size = builder.uitofp(middle, number)
        unit = builder.fdiv(builder.select(larger, builder.fneg(top), bottom), size)
        bits = builder.add(builder.bitcast(unit, _I32), ir.Constant(_I32, 0x8000))
        upper = builder.lshr(bits, ir.Constant(_I32, 16))
        half = ir.IntType(16)
        builder.store(builder.trunc(upper, half), _at(builder, scale, half), align=2)
        used = builder.bitcast(builder.shl(upper, ir.Constant(_I32, 16)), number)
        offset = _splat(builder, size)
        last = builder.fsub(builder.fadd(offset, offset), avx512.splat(REAL, 1.0))
        inverse, narrow = _splat(builder, _inverse(builder, used)), ir.VectorType(_I8, PANEL)
        for i, part in enumerate(parts):
            moved = avx512.fma(builder, part, inverse, offset)
            rounded = avx512.call(builder, "llvm.rint.v16f32", REAL, moved)
            rounded = builder.select(builder.fcmp_ordered(">", rounded, last), last, rounded)
            whole = avx512.call(builder, "llvm.fptosi.sat.v16i32.v16f32", WHOLE, rounded)
            place = _at(builder, _plus(builder, out, i * PANEL), narrow)
            builder.store(builder.trunc(whole, narrow), place, align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
