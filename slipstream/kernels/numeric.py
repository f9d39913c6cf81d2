"""Exponential, sums, maximum and rounding in fp32, which compile to vector instructions.

The compiler may reorder only the sums. All other operations keep the order of the source.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel, vector_sum
from slipstream.kernels.memory import floats_at, halves_at, number_of_bits, power_of_two, words_at

F = np.float32
ZERO, HALF, ONE = F(0), F(0.5), F(1)

LOG2_E = F(1.4426950408889634)
# log(2) in two parts: the first has few bits, so that its multiples are exact.
LN2_HIGH, LN2_LOW = F(0.693359375), F(-2.12194440e-4)
# Minimax polynomial of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2 (Cephes, expf).
_C0, _C1, _C2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
_C3, _C4, _C5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)
EXP_TERMS = (_C0, _C1, _C2, _C3, _C4, _C5)
LOWEST, HIGHEST = F(-87.0), F(88.0)
"""`exp` clamps its argument to this range."""


@kernel
def exp(x: F) -> F:
    """Return e ** x to 2 units in the last place. NaN stays NaN.

    Below -87 the result is that of -87 (1.6e-38), above 88 that of 88.
    """
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    n: F = np.floor(x * LOG2_E + HALF)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = _C0
    y = y * r + _C1
    y = y * r + _C2
    y = y * r + _C3
    y = y * r + _C4
    y = y * r + _C5
    y = y * (r * r) + r + ONE
    scaled: F = y * power_of_two(n)
    return scaled


_U = np.uint32
_31, _SIGN, _ALL = _U(31), _U(0x80000000), _U(0xFFFFFFFF)
_UNSIGNED, _INFINITE = _U(0x7FFFFFFF), _U(0x7F800000)


@kernel
def largest(x: int, n: int) -> F:
    """Return the largest of `n` >= 1 numbers at an address, or NaN if there is a NaN.

    Numbers are compared as integers in the same order, because compilers do not vectorize a maximum
    of floats.
    """
    bits = carray(words_at(x), (n,))
    top = _U(0)
    for i in range(n):
        b = bits[i]
        rank = _U(b ^ (_ALL if b >= _SIGN else _SIGN))
        rank = _ALL if _U(b & _UNSIGNED) > _INFINITE else rank
        top = rank if rank > top else top
    found: F = number_of_bits(_U(top ^ _SIGN) if top >= _SIGN else _U(~top))
    return found


@vector_sum
def squares(x: int, n: int) -> F:
    """Return the sum of the squares of `n` numbers at an address."""
    a = carray(floats_at(x), (n,))
    s = ZERO
    for i in range(n):
        s += a[i] * a[i]
    return s


@vector_sum
def total(x: int, n: int) -> F:
    """Return the sum of `n` numbers at an address."""
    a = carray(floats_at(x), (n,))
    s = ZERO
    for i in range(n):
        s += a[i]
    return s


@vector_sum
def triple(x: int, y: int, z: int, n: int) -> F:
    """Return the sum of x[i] * y[i] * z[i] over `n` numbers at three addresses."""
    a, b = carray(floats_at(x), (n,)), carray(floats_at(y), (n,))
    c = carray(floats_at(z), (n,))
    s = ZERO
    for i in range(n):
        s += a[i] * b[i] * c[i]
    return s


_HALF, _ODD, _SIXTEEN = _U(0x7FFF), _U(1), _U(16)
_QUIET = _U(0x40)


@kernel
def round_to_bf16(x, out, count):
    """Round fp32 numbers to the nearest bf16, ties to even. NaN stays NaN."""
    a, o = carray(words_at(x), (count,)), carray(halves_at(out), (count,))
    for i in range(count):
        upper = _U(a[i] >> _SIXTEEN)
        rounded = _U(_U(a[i] + _U(_HALF + _U(upper & _ODD))) >> _SIXTEEN)
        o[i] = np.uint16(_U(upper | _QUIET) if _U(a[i] & _UNSIGNED) > _INFINITE else rounded)


@kernel
def widen(halves, out, count):
    """Convert bf16 numbers to fp32."""
    a, o = carray(halves_at(halves), (count,)), carray(words_at(out), (count,))
    for i in range(count):
        o[i] = _U(_U(a[i]) << _SIXTEEN)
