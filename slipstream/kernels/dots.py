"""Dot products of one vector with several others, in vector instructions.

A dot product has the same bits on every CPU and for any number of other vectors, because this file
fixes the order in which vector lanes are added. A compiler (`compiling.vector_sum`) may choose
different orders in different loops.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import floats_at
from slipstream.kernels.tile import Emitter

_VECTORS = 2
"""The number of vectors, of eight numbers each, that accumulate side by side."""

_BLOCK = 8 * _VECTORS


def _sums(rows: int) -> Any:
    """Return an intrinsic for dot products with `rows` vectors.

    Its arguments are the addresses of x and of the first vector, bytes between vectors, number of
    blocks in each vector, and the address for the results.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y, step, blocks, out = args
        emit = Emitter(builder)
        before = builder.basic_block
        test, loop = builder.append_basic_block("blocks"), builder.append_basic_block("block")
        after = builder.append_basic_block("done")
        nothing = ir.Constant(emit.vector, [0.0] * 8)
        places = [ir.Constant(emit.i64, 0), x, *emit.series(y, step, rows)]
        builder.branch(test)
        builder.position_at_end(test)
        here = emit.phis(emit.i64, places, before)
        sums = [emit.phis(emit.vector, [nothing] * _VECTORS, before) for _ in range(rows)]
        builder.cbranch(builder.icmp_signed("<", here[0], blocks), loop, after)
        builder.position_at_end(loop)
        factors = emit.vectors(here[1], _VECTORS)
        done = [
            [
                emit.fma(*triple)
                for triple in zip(factors, emit.vectors(address, _VECTORS), row, strict=True)
            ]
            for address, row in zip(here[2:], sums, strict=True)
        ]
        following = [builder.add(here[0], ir.Constant(emit.i64, 1))]
        following += [emit.plus(address, 4 * _BLOCK) for address in here[1:]]
        held = [*here, *chain.from_iterable(sums)]
        for phi, value in zip(held, [*following, *chain.from_iterable(done)], strict=True):
            phi.add_incoming(value, loop)
        builder.branch(test)
        builder.position_at_end(after)
        for i, row in enumerate(sums):
            emit.store_number(emit.sum(row), emit.plus(out, 4 * i))
        return context.get_dummy_value()

    def sums_of(typingctx: Any, x: Any, y: Any, step: Any, blocks: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return intrinsic(sums_of)


_one, _four = _sums(1), _sums(4)


@intrinsic
def _fused(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@kernel
def dots(x: int, y: int, n: int, count: int, out: int) -> None:
    """Compute the dot products of the vector `x` of `n` numbers with `count` vectors at `y`."""
    step, blocks = 4 * n, n // _BLOCK
    j = 0
    while j + 4 <= count:
        _four(x, y + j * step, step, blocks, out + 4 * j)
        j += 4
    while j < count:
        _one(x, y + j * step, step, blocks, out + 4 * j)
        j += 1
    if n % _BLOCK:
        a, o = carray(floats_at(x), (n,)), carray(floats_at(out), (count,))
        for j in range(count):
            b = carray(floats_at(y + j * step), (n,))
            s = o[j]
            for i in range(blocks * _BLOCK, n):
                s = _fused(a[i], b[i], s)
            o[j] = s
