"""Exponential, sums, maximum and rounding in fp32, which compile to vector instructions.

Only the sums may be split into lanes; everywhere else numbers are combined as they are written.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.kernels.compiling import kernel, lanes
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
"""What `exp` is computed between."""


@kernel
def exp(x: F) -> F:
    """e ** x to 2 units in the last place; below -87 as at -87 (1.6e-38), above 88 as at 88. NaN
    stays NaN."""
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
    """The largest of `n` numbers at an address, at least one; NaN where one is. Compared as
    integers that stand in the same order: a maximum of floats is not split into lanes."""
    bits = carray(words_at(x), (n,))
    top = _U(0)
    for i in range(n):
        b = bits[i]
        place = _U(b ^ (_ALL if b >= _SIGN else _SIGN))
        place = _ALL if _U(b & _UNSIGNED) > _INFINITE else place
        top = place if place > top else top
    found: F = number_of_bits(_U(top ^ _SIGN) if top >= _SIGN else _U(~top))
    return found


@lanes
def squares(x: int, n: int) -> F:
    """Sum of the squares of `n` numbers at an address."""
    a = carray(floats_at(x), (n,))
    s = ZERO
    for i in range(n):
        s += a[i] * a[i]
    return s


@lanes
def total(x: int, n: int) -> F:
    """Sum of `n` numbers at an address."""
    a = carray(floats_at(x), (n,))
    s = ZERO
    for i in range(n):
        s += a[i]
    return s


@lanes
def triple(x: int, y: int, z: int, n: int) -> F:
    """Sum of products of three."""
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
    """fp32 to bf16, to the nearest, of two as near the even one; NaN stays NaN."""
    a, o = carray(words_at(x), (count,)), carray(halves_at(out), (count,))
    for i in range(count):
        upper = _U(a[i] >> _SIXTEEN)
        rounded = _U(_U(a[i] + _U(_HALF + _U(upper & _ODD))) >> _SIXTEEN)
        o[i] = np.uint16(_U(upper | _QUIET) if _U(a[i] & _UNSIGNED) > _INFINITE else rounded)


@kernel
def widen(halves, out, count):
    """bf16 to fp32."""
    a, o = carray(halves_at(halves), (count,)), carray(words_at(out), (count,))
    for i in range(count):
        o[i] = _U(_U(a[i]) << _SIXTEEN)
