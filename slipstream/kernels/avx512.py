"""AVX-512 code for 16 fp32 lanes that Numba does not generate from loops.

The file has functions over an LLVM IR builder, and intrinsics that other files share. It is only
used on CPUs with AMX or AVX512_BF16, because all of these have AVX-512.
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


def splat(kind: Any, value: float) -> Any:
    """Return a constant vector with the same number in all lanes."""
    return ir.Constant(kind, [value] * PANEL)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM function."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", REAL, a, b, c)


def load(builder: Any, address: Any) -> Any:
    """Load 16 fp32 numbers from an address."""
    return builder.load(builder.inttoptr(address, REAL.as_pointer()), align=4)


def store(builder: Any, value: Any, address: Any) -> None:
    """Store 16 fp32 numbers to an address."""
    builder.store(value, builder.inttoptr(address, REAL.as_pointer()), align=4)


def store_bf16(builder: Any, value: Any, address: Any) -> None:
    """Store 16 fp32 numbers as bf16 to an address. Subnormal numbers become zero."""
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    rounded = call(builder, name, ir.VectorType(BFloat(), PANEL), value)
    place = builder.inttoptr(address, _BITS.as_pointer())
    builder.store(builder.bitcast(rounded, _BITS), place, align=2)


def exp(builder: Any, x: Any) -> Any:
    """Return e ** x as `numeric.exp` does, but with fused multiply-adds."""
    # NaN stays NaN, because no ordered comparison with it holds.
    for limit, beyond in ((LOWEST, "<"), (HIGHEST, ">")):
        bound = splat(REAL, float(limit))
        x = builder.select(builder.fcmp_ordered(beyond, x, bound), bound, x)
    scaled = fma(builder, x, splat(REAL, float(LOG2_E)), splat(REAL, 0.5))
    n = call(builder, "llvm.floor.v16f32", REAL, scaled)
    r = fma(builder, n, splat(REAL, -float(LN2_HIGH)), x)
    r = fma(builder, n, splat(REAL, -float(LN2_LOW)), r)
    y = splat(REAL, float(EXP_TERMS[0]))
    for term in EXP_TERMS[1:]:
        y = fma(builder, y, r, splat(REAL, float(term)))
    y = builder.fadd(fma(builder, y, builder.fmul(r, r), r), splat(REAL, 1.0))
    biased = builder.add(builder.fptosi(n, WHOLE), splat(WHOLE, 127))
    power = builder.bitcast(builder.shl(biased, splat(WHOLE, 23)), REAL)
    return builder.fmul(y, power)


def gated(builder: Any, gate: Any, up: Any) -> Any:
    """Return silu(gate) * up, with the division exact to 2 units in the last place."""
    denominator = builder.fadd(exp(builder, builder.fneg(gate)), splat(REAL, 1.0))
    # A reciprocal of 14 bits, and one step of Newton's method.
    name = "llvm.x86.avx512.rcp14.ps.512"
    all_lanes = ir.Constant(ir.IntType(16), -1)
    guess = call(builder, name, REAL, denominator, splat(REAL, 0.0), all_lanes)
    error = fma(builder, builder.fneg(denominator), guess, splat(REAL, 1.0))
    reciprocal = fma(builder, guess, error, guess)
    return builder.fmul(builder.fmul(gate, reciprocal), up)


def _reduce(builder: Any, value: Any, combine: Any) -> Any:
    """Reduce 16 lanes to one number: combine the lower and the upper half, and repeat."""
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
    """Return the sum of 16 lanes, added by halves."""
    return _reduce(builder, value, builder.fadd)


def largest(builder: Any, value: Any) -> Any:
    """Return the largest of 16 lanes, ignoring NaN unless all are NaN."""
    return _reduce(builder, value, lambda a, b: _larger(builder, a, b))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _broadcast(builder: Any, number: Any, kind: Any) -> Any:
    """Return a vector with a number in all lanes."""
    vector = builder.insert_element(
        ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(WHOLE, [0] * PANEL)
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), zeros)


@intrinsic
def softmax_row(typingctx: Any, scores: Any, weights: Any, sees: Any, width: Any) -> Any:
    """Write exp(score - largest) of the first `sees` >= 1 scores as bf16 to `weights`.

    Zeros follow up to `width`, a multiple of 16. The function may read `width` scores. Returns the
    largest score and the sum of the weights before rounding. The sum runs in 16 lanes, which are
    then added by halves, so it does not depend on `width`. If a score is NaN, the sum is NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, weights, sees, width = args
        lanes, zero = ir.Constant(_I64, PANEL), splat(REAL, 0.0)
        blocks, whole = builder.udiv(width, lanes), builder.udiv(sees, lanes)
        lowest = splat(REAL, float("-inf"))
        lane = ir.Constant(WHOLE, list(range(PANEL)))
        left = _broadcast(builder, builder.trunc(builder.urem(sees, lanes), ir.IntType(32)), WHOLE)
        within = builder.icmp_unsigned("<", lane, left)
        has_rest = builder.icmp_unsigned(">", builder.urem(sees, lanes), ir.Constant(_I64, 0))

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
        largest_score = _broadcast(builder, top, REAL)
        sums = cgutils.alloca_once_value(builder, zero)

        def weight_at(index: Any) -> Any:
            score = load(builder, block_at(scores, index, 4))
            return exp(builder, builder.fsub(score, largest_score))

        def add(weight: Any, index: Any) -> None:
            builder.store(builder.fadd(builder.load(sums), weight), sums)
            store_bf16(builder, weight, block_at(weights, index, 2))

        with cgutils.for_range(builder, whole) as loop:
            add(weight_at(loop.index), loop.index)
        with builder.if_then(has_rest):
            add(builder.select(within, weight_at(whole), zero), whole)
        done = builder.add(whole, builder.zext(has_rest, _I64))
        with cgutils.for_range_slice(builder, done, blocks, ir.Constant(_I64, 1), _I64) as (i, _):
            store_bf16(builder, zero, block_at(weights, i, 2))
        mass = total(builder, builder.load(sums))
        return context.make_tuple(builder, signature.return_type, (top, mass))

    pair = types.UniTuple(types.float32, 2)
    return pair(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def rotate_row(
    typingctx: Any, x: Any, norm: Any, eps: Any, cos: Any, sin: Any, times: Any, out: Any, half: Any
) -> Any:
    """Compute `attend.rotate` of a head of 2 * `half` numbers, a multiple of 32, as bf16.

    All arguments except `times` and `half` are addresses; `eps` points to one number. Squares are
    summed in 16 lanes, which are then added by halves.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, norm, eps, cos, sin, times, out, half = args
        blocks = builder.udiv(half, ir.Constant(_I64, PANEL))
        second_half = builder.mul(half, ir.Constant(_I64, 4))
        normed = builder.icmp_unsigned("!=", norm, ir.Constant(_I64, 0))

        def both(start: Any, index: Any) -> tuple[Any, Any]:
            at = builder.add(start, builder.mul(index, ir.Constant(_I64, 4 * PANEL)))
            return load(builder, at), load(builder, builder.add(at, second_half))

        def rotate(index: Any, left: Any, right: Any) -> None:
            (c_left, c_right), (s_left, s_right) = both(cos, index), both(sin, index)
            factor = _broadcast(builder, times, REAL)
            at = builder.add(out, builder.mul(index, ir.Constant(_I64, 2 * PANEL)))
            low = fma(builder, left, c_left, builder.fmul(right, s_left))
            store_bf16(builder, builder.fmul(low, factor), at)
            high = fma(builder, right, c_right, builder.fmul(left, s_right))
            store_bf16(builder, builder.fmul(high, factor), builder.add(at, half_bytes))

        half_bytes = builder.mul(half, ir.Constant(_I64, 2))
        with builder.if_else(normed) as (then, otherwise):
            with then:
                sums = cgutils.alloca_once_value(builder, splat(REAL, 0.0))
                with cgutils.for_range(builder, blocks) as loop:
                    left, right = both(x, loop.index)
                    squares = fma(builder, left, left, builder.load(sums))
                    builder.store(fma(builder, right, right, squares), sums)
                width = builder.uitofp(builder.mul(half, ir.Constant(_I64, 2)), ir.FloatType())
                epsilon = builder.load(builder.inttoptr(eps, ir.FloatType().as_pointer()))
                mean = builder.fdiv(total(builder, builder.load(sums)), width)
                root = call(builder, "llvm.sqrt.f32", ir.FloatType(), builder.fadd(mean, epsilon))
                one = ir.Constant(ir.FloatType(), 1.0)
                scale = _broadcast(builder, builder.fdiv(one, root), REAL)
                with cgutils.for_range(builder, blocks) as loop:
                    pairs = zip(both(x, loop.index), both(norm, loop.index), strict=True)
                    rotate(
                        loop.index,
                        *(builder.fmul(builder.fmul(a, scale), w) for a, w in pairs),
                    )
            with otherwise, cgutils.for_range(builder, blocks) as loop:
                rotate(loop.index, *both(x, loop.index))
        return context.get_dummy_value()

    address = types.int64
    kinds = (address, address, address, address, address, types.float32, address, address)
    return types.void(*kinds), generate


@intrinsic
def gate_row(typingctx: Any, gates: Any, ups: Any, out: Any, count: Any) -> Any:
    """Compute `gated` of `count` numbers, a multiple of 16, at two addresses, to a third."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gates, ups, out, count = args
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(_I64, PANEL))) as loop:
            step = builder.mul(loop.index, ir.Constant(_I64, 4 * PANEL))
            gate, up = (load(builder, builder.add(at, step)) for at in (gates, ups))
            store(builder, gated(builder, gate, up), builder.add(out, step))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def gate_panel(
    typingctx: Any, gates: Any, ups: Any, bias: Any, up_bias: Any, out: Any, step: Any, rows: Any
) -> Any:
    """Compute `gated` of contiguous rows of 16 gates and 16 ups, plus their biases, as bf16.

    The biases are 16 numbers each, at `bias` and `up_bias`. Rows of `out` are `step` bytes apart.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gates, ups, bias, up_bias, out, step, rows = args
        gate_start, up_start = load(builder, bias), load(builder, up_bias)
        with cgutils.for_range(builder, rows) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, 4 * PANEL))
            gate = builder.fadd(load(builder, builder.add(gates, at)), gate_start)
            up = builder.fadd(load(builder, builder.add(ups, at)), up_start)
            place = builder.add(out, builder.mul(loop.index, step))
            store_bf16(builder, gated(builder, gate, up), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate
