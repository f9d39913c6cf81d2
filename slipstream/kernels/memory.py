"""Arrays at given addresses, in compiled code: what Numba has no spelling for.

Nothing is checked here; who passes an address answers for what is there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.compiling import kernel


def _typed(element: Any, llvm_type: ir.Type) -> Any:
    def at(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], llvm_type.as_pointer())

        return types.CPointer(element)(types.int64), generate

    return at


floats_at = intrinsic(_typed(types.float32, ir.FloatType()))
"""Pointer to fp32 numbers at an address; `numba.carray` makes an array of it."""

doubles_at = intrinsic(_typed(types.float64, ir.DoubleType()))
"""Pointer to fp64 numbers at an address."""

ints_at = intrinsic(_typed(types.int64, ir.IntType(64)))
"""Pointer to int64 numbers at an address."""

words_at = intrinsic(_typed(types.uint32, ir.IntType(32)))
"""Pointer to the bits of int32 numbers at an address."""

halves_at = intrinsic(_typed(types.uint16, ir.IntType(16)))
"""Pointer to the bits of bf16 numbers at an address."""

bytes_at = intrinsic(_typed(types.uint8, ir.IntType(8)))
"""Pointer to bytes, or booleans, at an address."""


LINE = 64
"""Bytes that memory gives at once."""


@kernel
def aligned(address):
    """The first line that begins at an address or after it."""
    return (address + LINE - 1) // LINE * LINE


@kernel
def hold(array):
    """Keep an array of which only the address is used until here: compiled code gives its memory
    back after its last use by name."""


@intrinsic
def ask_for(typingctx: Any, address: Any) -> Any:
    """Ask for what lies at an address, soon to be needed; it may be any number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any) -> None:
    """The instruction: into the second of the caches, for the first is too small to hold it."""
    byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, near, data = (ir.Constant(i32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, near, data])


@intrinsic
def number_of_bits(typingctx: Any, bits: Any) -> Any:
    """The fp32 number that a uint32 stands for."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for a whole fp32 number from -126 to 127, made from its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), generate
