"""Register tiles in fp32: a few rows times a few vectors of weights.

A tile keeps its sums in registers while it loops over the inputs. Every output is one chain of
fused multiply-adds over the inputs in order, whatever the number of rows of its tile. `product`,
`attend` and `dots` use this module.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.compiling import kernel
from slipstream.kernels.memory import prefetch

PANEL = 16
"""Number of outputs that a tile computes for each row and panel: two vectors of eight."""

_LANES = 8


class Emitter:
    """Emit instructions over addresses (integers), fp32 numbers and vectors of eight."""

    number = ir.FloatType()
    vector = ir.VectorType(number, _LANES)
    i64 = ir.IntType(64)

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")

    def plus(self, address: Any, nbytes: int) -> Any:
        """Return an address plus a constant number of bytes."""
        return self.builder.add(address, ir.Constant(self.i64, nbytes))

    def series(self, start: Any, step: Any, count: int) -> list[Any]:
        """Return `count` values: start, start + step, ..."""
        found = [start]
        while len(found) < count:
            found.append(self.builder.add(found[-1], step))
        return found

    def vectors(self, address: Any, count: int) -> list[Any]:
        """Load `count` contiguous vectors."""
        return [
            self.builder.load(self._at(self.plus(address, 32 * i), self.vector), align=4)
            for i in range(count)
        ]

    def broadcast(self, address: Any) -> Any:
        """Load one number into all lanes of a vector."""
        b, undefined = self.builder, ir.Constant(self.vector, ir.Undefined)
        one = b.insert_element(
            undefined, b.load(self._at(address, self.number)), ir.Constant(ir.IntType(32), 0)
        )
        places = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        return b.shuffle_vector(one, undefined, places)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def add_products(self, factor: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        """Return factor * weight + sum for each weight and sum."""
        pairs = zip(weights, sums, strict=True)
        return [self.fma(factor, w, s) for w, s in pairs]

    def sum(self, vectors: list[Any]) -> Any:
        """Return the sum of all lanes: add the vectors, then halve the lanes step by step."""
        found, *others = vectors
        for vector in others:
            found = self.builder.fadd(found, vector)
        lanes = _LANES
        while lanes > 1:
            lanes //= 2
            low, high = (
                ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(begin, begin + lanes)))
                for begin in (0, lanes)
            )
            undefined = ir.Constant(found.type, ir.Undefined)
            found = self.builder.fadd(
                self.builder.shuffle_vector(found, undefined, low),
                self.builder.shuffle_vector(found, undefined, high),
            )
        return self.builder.extract_element(found, ir.Constant(ir.IntType(32), 0))

    def store(self, vectors: list[Any], address: Any) -> None:
        """Store vectors contiguously."""
        for i, vector in enumerate(vectors):
            self.builder.store(vector, self._at(self.plus(address, 32 * i), self.vector), align=4)

    def store_number(self, number: Any, address: Any) -> None:
        """Store one number."""
        self.builder.store(number, self._at(address, self.number), align=4)

    def phis(self, kind: Any, values: list[Any], block: Any) -> list[Any]:
        """Return phi nodes that take `values` if `block` came before."""
        found = [self.builder.phi(kind) for _ in values]
        for phi, value in zip(found, values, strict=True):
            phi.add_incoming(value, block)
        return found

    def _at(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())


def _tile(rows: int, panels: int) -> Any:
    """Return an intrinsic for a tile of `rows` rows and `panels` panels of outputs.

    Its arguments are: the address of x and the bytes between its rows; the address of the weights,
    the bytes between inputs and the bytes between panels; the number of inputs (at least 1); the
    address of the initial sums and the bytes between those of two rows; the address of out and the
    bytes between its rows; the address to prefetch at the first input and the bytes from there to
    the next. The same offset is prefetched in every panel.
    """
    per_panel = PANEL // _LANES

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, weights, input_step, panel_step, count, start, start_step, *others = args
        out, out_step, *ahead = others
        emit = Emitter(builder)
        begin = [
            emit.vectors(address, panels * per_panel)
            for address in emit.series(start, start_step, rows)
        ]
        before = builder.basic_block
        loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("done")
        places = [
            ir.Constant(emit.i64, 0),
            ahead[0],
            *emit.series(weights, panel_step, panels),
            *emit.series(x, x_step, rows),
        ]
        steps = [ir.Constant(emit.i64, 1), ahead[1], *[input_step] * panels]
        steps += [ir.Constant(emit.i64, 4)] * rows
        builder.branch(loop)
        builder.position_at_end(loop)
        here = emit.phis(emit.i64, places, before)
        sums = [emit.phis(emit.vector, vectors, before) for vectors in begin]
        for address in emit.series(here[1], panel_step, panels):
            prefetch(builder, address)
        loaded = [w for p in range(panels) for w in emit.vectors(here[2 + p], per_panel)]
        done = [
            emit.add_products(emit.broadcast(address), loaded, row)
            for address, row in zip(here[2 + panels :], sums, strict=True)
        ]
        following = [builder.add(a, step) for a, step in zip(here, steps, strict=True)]
        for phi, value in zip([*here, *chain(*sums)], [*following, *chain(*done)], strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following[0], count), loop, after)
        builder.position_at_end(after)
        for row, address in zip(done, emit.series(out, out_step, rows), strict=True):
            emit.store(row, address)
        return context.get_dummy_value()

    def tile(
        typingctx: Any,
        x: Any,
        x_step: Any,
        weights: Any,
        input_step: Any,
        panel_step: Any,
        count: Any,
        start: Any,
        start_step: Any,
        out: Any,
        out_step: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 12), generate

    return intrinsic(tile)


tile_1x2, tile_2x2 = _tile(1, 2), _tile(2, 2)
tile_1, tile_2, tile_3 = _tile(1, 1), _tile(2, 1), _tile(3, 1)
tile_4, tile_5, tile_6 = _tile(4, 1), _tile(5, 1), _tile(6, 1)
"""Tiles by rows x panels. Six rows of two vectors use all sixteen vector registers."""


@kernel
def tiles(
    x: int,
    x_step: int,
    weights: int,
    input_step: int,
    count: int,
    start: int,
    start_step: int,
    out: int,
    out_step: int,
    rows: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """Compute one panel for any number of rows; the arguments are those of a tile.

    The tiles share the prefetching: each continues where the one before it stopped.
    """
    ahead_step //= max((rows + 5) // 6, 1)
    m = 0
    while m < rows:
        xm, om, left = x + m * x_step, out + m * out_step, rows - m
        sm = start + m * start_step
        # Eight rows are faster as four and four than as six and two.
        if left >= 6 and left != 8:
            tile_6(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 6
        elif left == 8 or left == 4:
            tile_4(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 4
        elif left == 5:
            tile_5(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 5
        elif left == 3:
            tile_3(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 3
        elif left == 2:
            tile_2(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 2
        else:
            tile_1(
                xm, x_step, weights, input_step, 0, count, sm, start_step, om, out_step, ahead,
                ahead_step,
            )  # fmt: skip
            m += 1
        ahead += ahead_step * count
