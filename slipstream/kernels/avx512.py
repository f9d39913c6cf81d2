"""Sixteen fp32 numbers at a time, as vectors of AVX-512: what Numba's loops do not become by
themselves.

Functions over an IR builder, for the intrinsics of other files, and those intrinsics that several
of them take. Only for processors that have a matrix unit (`processor.has_matrix_unit`), for all of
them have these vectors.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.numeric import (
    EXP_TERMS,
    HIGHEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
)
from slipstream.kernels.tile import PANEL
from slipstream.kernels.tile_bf16 import BFloat

REAL = ir.VectorType(ir.FloatType(), PANEL)
WHOLE = ir.VectorType(ir.IntType(32), PANEL)
_BITS = ir.VectorType(ir.IntType(16), PANEL)
_I64 = ir.IntType(64)


def all_of(kind: Any, value: float) -> Any:
    """A vector of one number."""
    return ir.Constant(kind, [value] * PANEL)


def call(builder: Any, name: str, result: Any, *given: Any) -> Any:
    """Call a function of LLVM."""
    kind = ir.FunctionType(result, [one.type for one in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", REAL, a, b, c)


def load(builder: Any, address: Any) -> Any:
    """Sixteen numbers at an address."""
    return builder.load(builder.inttoptr(address, REAL.as_pointer()), align=4)


def keep(builder: Any, value: Any, address: Any) -> None:
    """To an address."""
    builder.store(value, builder.inttoptr(address, REAL.as_pointer()), align=4)


def keep_narrow(builder: Any, value: Any, address: Any) -> None:
    """As bf16 to an address; what is too small for full precision becomes zero."""
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    rounded = call(builder, name, ir.VectorType(BFloat(), PANEL), value)
    place = builder.inttoptr(address, _BITS.as_pointer())
    builder.store(builder.bitcast(rounded, _BITS), place, align=2)


def exp(builder: Any, x: Any) -> Any:
    """`numeric.exp`, but that sums are fused multiply-adds."""
    # NaN stays: no comparison holds.
    for limit, beyond in ((LOWEST, "<"), (HIGHEST, ">")):
        bound = all_of(REAL, float(limit))
        x = builder.select(builder.fcmp_ordered(beyond, x, bound), bound, x)
    scaled = fused(builder, x, all_of(REAL, float(LOG2_E)), all_of(REAL, 0.5))
    n = call(builder, "llvm.floor.v16f32", REAL, scaled)
    r = fused(builder, n, all_of(REAL, -float(LN2_HIGH)), x)
    r = fused(builder, n, all_of(REAL, -float(LN2_LOW)), r)
    y = all_of(REAL, float(EXP_TERMS[0]))
    for term in EXP_TERMS[1:]:
        y = fused(builder, y, r, all_of(REAL, float(term)))
    y = builder.fadd(fused(builder, y, builder.fmul(r, r), r), all_of(REAL, 1.0))
    biased = builder.add(builder.fptosi(n, WHOLE), all_of(WHOLE, 127))
    power = builder.bitcast(builder.shl(biased, all_of(WHOLE, 23)), REAL)
    return builder.fmul(y, power)


def gated(builder: Any, gate: Any, up: Any) -> Any:
    """silu(gate) * up; the division to 2 units in the last place."""
    below = builder.fadd(exp(builder, builder.fneg(gate)), all_of(REAL, 1.0))
    # One step of Newton's method from 14 bits.
    name = "llvm.x86.avx512.rcp14.ps.512"
    all_lanes = ir.Constant(ir.IntType(16), -1)
    guess = call(builder, name, REAL, below, all_of(REAL, 0.0), all_lanes)
    off = fused(builder, builder.fneg(below), guess, all_of(REAL, 1.0))
    over = fused(builder, guess, off, guess)
    return builder.fmul(builder.fmul(gate, over), up)


def _halves(builder: Any, value: Any, combine: Any) -> Any:
    """One number of sixteen: those of the upper half with those of the lower one, and so on."""
    lanes = PANEL
    while lanes > 1:
        lanes //= 2
        parts = [
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(at, at + lanes))),
            )
            for at in (0, lanes)
        ]
        value = combine(*parts)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


def total(builder: Any, value: Any) -> Any:
    """The sum of sixteen numbers, by halves."""
    return _halves(builder, value, builder.fadd)


def largest(builder: Any, value: Any) -> Any:
    """The largest of sixteen numbers; none that is no number, if there is another."""
    return _halves(builder, value, lambda a, b: _larger(builder, a, b))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _spread(builder: Any, number: Any, kind: Any) -> Any:
    """A number in all places."""
    vector = builder.insert_element(
        ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(WHOLE, [0] * PANEL)
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), zeros)


@intrinsic
def softmax_row(typingctx: Any, scores: Any, weights: Any, sees: Any, width: Any) -> Any:
    """exp(score - largest) of the first `sees` numbers at an address, at least one, to another as
    bf16, with zeros up to `width`, which is a multiple of sixteen; that many scores may be read.
    Returns the largest and the sum of what has not been rounded, in lanes of sixteen, added up by
    halves: the same numbers whatever `width` is. With NaN among the scores the sum is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, weights, sees, width = args
        sixteen, zero = ir.Constant(_I64, PANEL), all_of(REAL, 0.0)
        blocks, whole = builder.udiv(width, sixteen), builder.udiv(sees, sixteen)
        lowest = all_of(REAL, float("-inf"))
        lane = ir.Constant(WHOLE, list(range(PANEL)))
        left = _spread(builder, builder.trunc(builder.urem(sees, sixteen), ir.IntType(32)), WHOLE)
        within = builder.icmp_unsigned("<", lane, left)
        has_rest = builder.icmp_unsigned(">", builder.urem(sees, sixteen), ir.Constant(_I64, 0))

        def block_at(start: Any, index: Any, size: int) -> Any:
            return builder.add(start, builder.mul(index, ir.Constant(_I64, size * PANEL)))

        tops = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range(builder, whole) as loop:
            x = load(builder, block_at(scores, loop.index, 4))
            builder.store(_larger(builder, x, builder.load(tops)), tops)
        with builder.if_then(has_rest):
            x = builder.select(within, load(builder, block_at(scores, whole, 4)), lowest)
            builder.store(_larger(builder, x, builder.load(tops)), tops)
        top = largest(builder, builder.load(tops))
        less = _spread(builder, top, REAL)
        sums = cgutils.alloca_once_value(builder, zero)

        def weigh(index: Any) -> Any:
            return exp(builder, builder.fsub(load(builder, block_at(scores, index, 4)), less))

        def add(weight: Any, index: Any) -> None:
            builder.store(builder.fadd(builder.load(sums), weight), sums)
            keep_narrow(builder, weight, block_at(weights, index, 2))

        with cgutils.for_range(builder, whole) as loop:
            add(weigh(loop.index), loop.index)
        with builder.if_then(has_rest):
            add(builder.select(within, weigh(whole), zero), whole)
        done = builder.add(whole, builder.zext(has_rest, _I64))
        with cgutils.for_range_slice(builder, done, blocks, ir.Constant(_I64, 1), _I64) as (i, _):
            keep_narrow(builder, zero, block_at(weights, i, 2))
        mass = total(builder, builder.load(sums))
        return context.make_tuple(builder, signature.return_type, (top, mass))

    pair = types.UniTuple(types.float32, 2)
    return pair(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def turn_row(
    typingctx: Any, x: Any, norm: Any, eps: Any, cos: Any, sin: Any, times: Any, out: Any, half: Any
) -> Any:
    """`attend.turn` of a head of twice `half` numbers, a multiple of 32, to bf16. All but `times`
    and `half` are addresses, `eps` of one number; squares are summed up in lanes of sixteen, by
    halves at the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, norm, eps, cos, sin, times, out, half = args
        blocks = builder.udiv(half, ir.Constant(_I64, PANEL))
        beside = builder.mul(half, ir.Constant(_I64, 4))
        normed = builder.icmp_unsigned("!=", norm, ir.Constant(_I64, 0))

        def both(start: Any, index: Any) -> tuple[Any, Any]:
            at = builder.add(start, builder.mul(index, ir.Constant(_I64, 4 * PANEL)))
            return load(builder, at), load(builder, builder.add(at, beside))

        def turned(index: Any, left: Any, right: Any) -> None:
            (c_left, c_right), (s_left, s_right) = both(cos, index), both(sin, index)
            heat = _spread(builder, times, REAL)
            at = builder.add(out, builder.mul(index, ir.Constant(_I64, 2 * PANEL)))
            low = fused(builder, left, c_left, builder.fmul(right, s_left))
            keep_narrow(builder, builder.fmul(low, heat), at)
            high = fused(builder, right, c_right, builder.fmul(left, s_right))
            keep_narrow(builder, builder.fmul(high, heat), builder.add(at, half_bytes))

        half_bytes = builder.mul(half, ir.Constant(_I64, 2))
        with builder.if_else(normed) as (then, otherwise):
            with then:
                sums = cgutils.alloca_once_value(builder, all_of(REAL, 0.0))
                with cgutils.for_range(builder, blocks) as loop:
                    left, right = both(x, loop.index)
                    squares = fused(builder, left, left, builder.load(sums))
                    builder.store(fused(builder, right, right, squares), sums)
                width = builder.uitofp(builder.mul(half, ir.Constant(_I64, 2)), ir.FloatType())
                tiny = builder.load(builder.inttoptr(eps, ir.FloatType().as_pointer()))
                mean = builder.fdiv(total(builder, builder.load(sums)), width)
                root = call(builder, "llvm.sqrt.f32", ir.FloatType(), builder.fadd(mean, tiny))
                one = ir.Constant(ir.FloatType(), 1.0)
                scale = _spread(builder, builder.fdiv(one, root), REAL)
                with cgutils.for_range(builder, blocks) as loop:
                    pairs = zip(both(x, loop.index), both(norm, loop.index), strict=True)
                    turned(
                        loop.index,
                        *(builder.fmul(builder.fmul(a, scale), w) for a, w in pairs),
                    )
            with otherwise, cgutils.for_range(builder, blocks) as loop:
                turned(loop.index, *both(x, loop.index))
        return context.get_dummy_value()

    address = types.int64
    given = (address, address, address, address, address, types.float32, address, address)
    return types.void(*given), generate


@intrinsic
def gate_row(typingctx: Any, gates: Any, ups: Any, out: Any, count: Any) -> Any:
    """`gated` of `count` numbers at two addresses, a multiple of sixteen, to a third."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gates, ups, out, count = args
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(_I64, PANEL))) as loop:
            step = builder.mul(loop.index, ir.Constant(_I64, 4 * PANEL))
            gate, up = (load(builder, builder.add(at, step)) for at in (gates, ups))
            keep(builder, gated(builder, gate, up), builder.add(out, step))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def gate_panel(
    typingctx: Any, gates: Any, ups: Any, start: Any, beside: Any, out: Any, step: Any, rows: Any
) -> Any:
    """`gated` of rows of sixteen numbers, one row after another at two addresses, to which those at
    `start` and `beside` are added first; as bf16, `step` bytes from row to row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gates, ups, start, beside, out, step, rows = args
        less, more = load(builder, start), load(builder, beside)
        with cgutils.for_range(builder, rows) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, 4 * PANEL))
            gate = builder.fadd(load(builder, builder.add(gates, at)), less)
            up = builder.fadd(load(builder, builder.add(ups, at)), more)
            place = builder.add(out, builder.mul(loop.index, step))
            keep_narrow(builder, gated(builder, gate, up), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate
