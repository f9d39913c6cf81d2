"""Arrays at given addresses, in compiled code: what Numba has no spelling for.

Nothing is checked here; who passes an address answers for what is there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _typed(element: Any, llvm_type: ir.Type) -> Any:
    def at(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], llvm_type.as_pointer())

        return types.CPointer(element)(types.int64), generate

    return at


floats_at = intrinsic(_typed(types.float32, ir.FloatType()))
"""Pointer to fp32 numbers at an address; `numba.carray` makes an array of it."""

ints_at = intrinsic(_typed(types.int64, ir.IntType(64)))
"""Pointer to int64 numbers at an address."""

words_at = intrinsic(_typed(types.uint32, ir.IntType(32)))
"""Pointer to the bits of int32 numbers at an address."""

bytes_at = intrinsic(_typed(types.uint8, ir.IntType(8)))
"""Pointer to bytes, or booleans, at an address."""


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for a whole fp32 number from -126 to 127, made from its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), generate
