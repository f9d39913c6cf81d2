"""Register tiles in bf16: a few rows times a few vectors of weights, summed in fp32.

Rows and weights are bf16, with two inputs side by side in 32 bits. Every output is one chain over
the pairs of inputs in order, whatever the number of rows of its tile. Within a pair the second
input is added first. On CPUs with AVX512_BF16, one instruction multiplies and adds a pair;
elsewhere two fused multiply-adds do. The instruction treats subnormal numbers as zero. The
multiply-adds do the same on CPUs that use both (`WIDE_FROM`). `product`, `attend_bf16` and
`attend_backward_bf16` use this module.
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
from slipstream.kernels.processor import has_avx512_bf16, is_intel
from slipstream.kernels.tile import PANEL

_IN_HARDWARE = has_avx512_bf16()

WIDE_FROM = 4 if _IN_HARDWARE and is_intel() else 1 << 30
"""From this number of rows on, rows and weights are widened to fp32, with the same resulting bits.
On Intel CPUs two fused multiply-adds take less time than the pair instruction
(docs/log/kernels.md), and several rows share the cost of widening the weights."""

MOST_ROWS = 12 if _IN_HARDWARE else 3
"""Number of rows of the largest tile: with two panels, it fills the vector registers."""

FEW_ROWS = 2 if _IN_HARDWARE and not is_intel() else 0
"""Up to this number of rows, four panels are computed at a time, without prefetching. Four chains
of sums hide the latency of the pair instruction, and the CPU's own reads ahead are faster
(docs/log/kernels.md). Measured on Zen 5 only; Intel CPUs compute as before."""

_LINE = 4 * PANEL
"""Bytes of a panel's weights for one pair of inputs."""


class BFloat(ir.types._BaseFloatType):  # type: ignore[misc]  # llvmlite has no bf16
    """The LLVM type `bfloat`."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: Any) -> str:
        raise NotImplementedError


BFloat._create_instance()


class _Emitter:
    """Emit the instructions of a tile. Addresses are integers; sums are vectors of 16 fp32."""

    i32, i64 = ir.IntType(32), ir.IntType(64)
    sums = ir.VectorType(ir.FloatType(), PANEL)
    pairs = ir.VectorType(i32, PANEL)

    def __init__(self, builder: Any, wide: bool) -> None:
        self.builder = builder
        self._wide, self._in_hardware = wide, _IN_HARDWARE and not wide
        if self._in_hardware:
            self._halves = ir.VectorType(BFloat(), 2 * PANEL)
            kind = ir.FunctionType(self.sums, [self.sums, self._halves, self._halves])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
        else:
            kind = ir.FunctionType(self.sums, [self.sums] * 3)
            name = f"llvm.fma.v{PANEL}f32"
        self._function = cgutils.get_or_insert_function(builder.module, kind, name)

    def plus(self, address: Any, nbytes: int) -> Any:
        """Return an address plus a constant number of bytes."""
        return self.builder.add(address, ir.Constant(self.i64, nbytes))

    def load(self, address: Any, kind: Any) -> Any:
        """Load a value of a type."""
        return self.builder.load(self._at(address, kind), align=4)

    def broadcast(self, address: Any, kind: Any, vector: Any) -> Any:
        """Load one number into all lanes of a vector."""
        b, undefined = self.builder, ir.Constant(vector, ir.Undefined)
        one = b.insert_element(undefined, self.load(address, kind), ir.Constant(self.i32, 0))
        return b.shuffle_vector(one, undefined, ir.Constant(self.pairs, [0] * PANEL))

    def row_at(self, address: Any) -> Any:
        """Load one pair of inputs of a row into all lanes."""
        if self._wide:
            return tuple(
                self.broadcast(self.plus(address, nbytes), ir.FloatType(), self.sums)
                for nbytes in (0, 4)
            )
        pair = self.broadcast(address, self.i32, self.pairs)
        return pair if self._in_hardware else self.halves(pair)

    def weights_at(self, address: Any) -> Any:
        """Load one pair of inputs for each of 16 outputs."""
        pairs = self.load(address, self.pairs)
        return pairs if self._in_hardware else self.halves(pairs)

    def halves(self, pairs: Any) -> Any:
        """Return the first and the second number of each pair as fp32."""
        return self._first(pairs), self._second(pairs)

    def add_products(self, row: Any, weights: Any, total: Any) -> Any:
        """Return `total` plus the products of a row's pair with the weights' pairs, per lane."""
        b = self.builder
        if self._in_hardware:
            halves = [b.bitcast(pair, self._halves) for pair in (row, weights)]
            return b.call(self._function, [total, *halves])
        for half in (1, 0):
            total = b.call(self._function, [row[half], weights[half], total])
        return total

    def _first(self, pairs: Any) -> Any:
        half_bits = ir.Constant(self.pairs, [16] * PANEL)
        return self.builder.bitcast(self.builder.shl(pairs, half_bits), self.sums)

    def _second(self, pairs: Any) -> Any:
        upper = ir.Constant(self.pairs, [0xFFFF0000] * PANEL)
        return self.builder.bitcast(self.builder.and_(pairs, upper), self.sums)

    def store(self, vector: Any, address: Any) -> None:
        """Store a vector of sums."""
        self.builder.store(vector, self._at(address, self.sums), align=4)

    def phis(self, kind: Any, values: list[Any], block: Any) -> list[Any]:
        """Return phi nodes that take `values` if `block` came before."""
        found = [self.builder.phi(kind) for _ in values]
        for phi, value in zip(found, values, strict=True):
            phi.add_incoming(value, block)
        return found

    def _at(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())


_THREE = 3
"""Number of rows that share one address register: at the address, plus one step, plus two."""


def _emit_tile(
    builder: Any, rows: int, panels: int, wide: bool, prefetches: bool, args: Any
) -> None:
    """Emit the code of a tile of `rows` rows and `panels` panels of outputs.

    `args` are: the address of x and the bytes between its rows; the address of the weights, the
    bytes between pairs and the bytes between panels; the number of pairs of inputs (at least 1);
    the address of the initial sums and the bytes between those of two rows; the address of out and
    the bytes between its rows; the address to prefetch at the first pair and the bytes from there
    to the next. The same offset is prefetched in every panel, if the tile prefetches at all.
    """
    x, x_step, weights, pair_step, panel_step, count, start, start_step, *others = args
    out, out_step, ahead, ahead_step = others
    emit = _Emitter(builder, wide)
    two_steps = builder.shl(x_step, ir.Constant(emit.i64, 1))
    begin = []
    for _ in range(rows):
        begin.append([emit.load(emit.plus(start, _LINE * p), emit.sums) for p in range(panels)])
        start = builder.add(start, start_step)
    bases, base = [x], x
    while len(bases) * _THREE < rows:
        base = builder.add(builder.add(base, two_steps), x_step)
        bases.append(base)
    before = builder.basic_block
    loop, after = builder.append_basic_block("pairs"), builder.append_basic_block("done")
    places = [ir.Constant(emit.i64, 0), ahead, weights, *bases]
    steps = [ir.Constant(emit.i64, 1), ahead_step, pair_step]
    steps += [ir.Constant(emit.i64, 8 if wide else 4)] * len(bases)
    builder.branch(loop)
    builder.position_at_end(loop)
    here = emit.phis(emit.i64, places, before)
    sums = [emit.phis(emit.sums, vectors, before) for vectors in begin]
    prefetched, line, loaded = here[1], here[2], []
    for p in range(panels):
        if p:
            prefetched, line = builder.add(prefetched, panel_step), builder.add(line, panel_step)
        if prefetches:
            prefetch(builder, prefetched)
        loaded.append(emit.weights_at(line))
    done = []
    for m, row in enumerate(sums):
        address = here[3 + m // _THREE]
        if m % _THREE:
            address = builder.add(address, x_step if m % _THREE == 1 else two_steps)
        factor = emit.row_at(address)
        both = zip(loaded, row, strict=True)
        done.append([emit.add_products(factor, w, total) for w, total in both])
    following = [builder.add(a, step) for a, step in zip(here, steps, strict=True)]
    for phi, value in zip([*here, *chain(*sums)], [*following, *chain(*done)], strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following[0], count), loop, after)
    builder.position_at_end(after)
    for row in done:
        for p, vector in enumerate(row):
            emit.store(vector, emit.plus(out, _LINE * p))
        out = builder.add(out, out_step)


_FLUSH = 0x8040
"""Bits of the MXCSR register that flush subnormal results and inputs to zero."""


def _flush_subnormals(builder: Any) -> Any:
    """Flush subnormals to zero from here on. Return the address of the register's old value."""
    before, now = (cgutils.alloca_once(builder, _Emitter.i32) for _ in range(2))
    _control(builder, "stmxcsr", before)
    bits = builder.or_(builder.load(before), ir.Constant(_Emitter.i32, _FLUSH))
    builder.store(bits, now)
    _control(builder, "ldmxcsr", now)
    return before


def _control(builder: Any, name: str, place: Any) -> None:
    """Emit an instruction that loads or stores MXCSR."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
    builder.call(function, [builder.bitcast(place, byte)])


_ARGUMENTS = types.void(*[types.int64] * 13)


def _up_to(most: int, panels: int, *, wide: bool = False, prefetches: bool = True) -> Any:
    """Return an intrinsic for tiles of 1 to `most` rows.

    Its arguments are the number of rows and the arguments of `_emit_tile`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if wide and most < WIDE_FROM:
            return context.get_dummy_value()  # Never called on this CPU.
        before = _flush_subnormals(builder) if wide else None
        kinds = [builder.append_basic_block(f"rows{n}") for n in range(1, most + 1)]
        end = builder.append_basic_block("end")
        choice = builder.switch(args[0], end)
        for rows, block in enumerate(kinds, 1):
            choice.add_case(ir.Constant(_Emitter.i64, rows), block)
            builder.position_at_end(block)
            _emit_tile(builder, rows, panels, wide, prefetches, args[1:])
            builder.branch(end)
        builder.position_at_end(end)
        if before is not None:
            _control(builder, "ldmxcsr", before)
        return context.get_dummy_value()

    def tile(
        typingctx: Any,
        rows: Any,
        x: Any,
        x_step: Any,
        weights: Any,
        pair_step: Any,
        panel_step: Any,
        count: Any,
        start: Any,
        start_step: Any,
        out: Any,
        out_step: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return _ARGUMENTS, generate

    return intrinsic(tile)


_one_panel, _two_panels = _up_to(1, 1), _up_to(MOST_ROWS, 2)
_two_panels_wide = _up_to(MOST_ROWS, 2, wide=True)
_four_panels = _up_to(max(FEW_ROWS, 1), 4, prefetches=False)


@kernel
def panels_bf16(
    x, x_step, weights, pair_step, panel_step, begin, end, total, pairs, start, start_step,
    row_step, out, out_step, rows, ahead, wide,
):  # fmt: skip
    """Compute panels `begin` to `end` of `total` for any number of rows.

    Panels are computed two at a time; the last two may be computed twice, with the same results.
    Rows are divided evenly among tiles. They are bf16 or, if `wide`, bf16 values in fp32 (at least
    `WIDE_FROM` rows). The initial sums of two panels are `start_step` bytes apart, those of two
    rows `row_step` bytes. The memory `ahead` bytes after each weight is prefetched; the tiles share
    the prefetching.
    """
    if total == 1 and begin < end:
        for m in range(rows):
            row, o = x + m * x_step, out + m * out_step
            b = start + m * row_step
            _one_panel(1, row, 0, weights, pair_step, 0, pairs, b, 0, o, 0, weights, 0)
        return
    count = (rows + MOST_ROWS - 1) // MOST_ROWS
    p = begin
    while p < end:
        q = min(p, total - 2)
        w, b, o = weights + q * panel_step, start + q * start_step, out + _LINE * q
        first, step = w + ahead, pair_step // count
        m = 0
        for tile in range(count):
            here = rows * (tile + 1) // count - m
            row, place, fetched = x + m * x_step, o + m * out_step, first + tile * step * pairs
            sums = b + m * row_step
            if wide:
                _two_panels_wide(
                    here, row, x_step, w, pair_step, panel_step, pairs, sums, row_step, place,
                    out_step, fetched, step,
                )  # fmt: skip
            else:
                _two_panels(
                    here, row, x_step, w, pair_step, panel_step, pairs, sums, row_step, place,
                    out_step, fetched, step,
                )  # fmt: skip
            m += here
        p += 2


@kernel
def panels_of_few_rows(
    x, x_step, weights, panel_step, begin, end, pairs, start, out, out_step, rows
):
    """Compute panels `begin` to `end` of up to `FEW_ROWS` rows, four at a time.

    Returns the first of the last panels, which are not computed. The arguments are as for
    `panels_bf16`, with the initial sums of the panels side by side.
    """
    p = begin
    while p + 4 <= end:
        w, b, o = weights + p * panel_step, start + _LINE * p, out + _LINE * p
        _four_panels(rows, x, x_step, w, _LINE, panel_step, pairs, b, 0, o, out_step, w, 0)
        p += 4
    return p
