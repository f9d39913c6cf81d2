"""Access memory at given addresses in compiled code, which Numba does not offer itself.

Nothing is checked here. The caller is responsible for the memory at an address.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.compiling import kernel


def _typed(element: Any, llvm_type: ir.Type) -> Any:
    """Return the implementation of an intrinsic that casts an address to a pointer."""

    def at(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], llvm_type.as_pointer())

        return types.CPointer(element)(types.int64), generate

    return at


floats_at = intrinsic(_typed(types.float32, ir.FloatType()))
"""Return a pointer to fp32 numbers at an address. `numba.carray` turns it into an array."""

doubles_at = intrinsic(_typed(types.float64, ir.DoubleType()))
"""Return a pointer to fp64 numbers at an address."""

ints_at = intrinsic(_typed(types.int64, ir.IntType(64)))
"""Return a pointer to int64 numbers at an address."""

words_at = intrinsic(_typed(types.uint32, ir.IntType(32)))
"""Return a pointer to the bits of 32-bit numbers at an address."""

halves_at = intrinsic(_typed(types.uint16, ir.IntType(16)))
"""Return a pointer to the bits of bf16 numbers at an address."""

bytes_at = intrinsic(_typed(types.uint8, ir.IntType(8)))
"""Return a pointer to bytes or booleans at an address."""


LINE = 64
"""Bytes of a cache line."""


@kernel
def aligned(address):
    """Return the first address at or after `address` that is a multiple of a cache line."""
    return (address + LINE - 1) // LINE * LINE


@kernel
def hold(array):
    """Keep an array alive until this call, if code uses only its address.

    Compiled code frees an array after the last use of its name.
    """


@intrinsic
def prefetch_at(typingctx: Any, address: Any) -> Any:
    """Prefetch the memory at an address, which may be invalid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any) -> None:
    """Emit a prefetch into the second-level cache; the first level is too small for the data."""
    byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, near, data = (ir.Constant(i32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, near, data])


@intrinsic
def number_of_bits(typingctx: Any, bits: Any) -> Any:
    """Return the fp32 number with the bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """Return 2 ** exponent for a whole fp32 number from -126 to 127, from its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), generate
