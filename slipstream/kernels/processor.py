"""What this processor can do, as far as the kernels go by it. Knows nothing of this package."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from llvmlite import binding

NO_AMX = "SLIPSTREAM_NO_AMX"
"""Environment variable: set to anything but 0, the matrix unit is left alone."""

_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18
"""Arguments of arch_prctl(2): Linux lets a process use the tiles once it has asked."""
_ARCH_PRCTL = 158


@cache
def words() -> frozenset[str]:
    """What the system says of this CPU."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def by_intel() -> bool:
    """Whether this is a processor of Intel's."""
    return "GenuineIntel" in words()


@cache
def multiplies_pairs() -> bool:
    """Whether there is an instruction that multiplies and adds pairs of bf16 (AVX512_BF16)."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@cache
def has_matrix_unit() -> bool:
    """Whether kernels may use the matrix unit (AMX with bf16): it is there, the system lets this
    process have it, and the environment does not forbid it (`NO_AMX`)."""
    features = binding.get_host_cpu_features()
    if not all(features.get(name, False) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    if os.environ.get(NO_AMX, "0") not in ("", "0") or platform.system() != "Linux":
        return False
    ask = ctypes.CDLL(None, use_errno=True).syscall
    return bool(ask(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def bf16_products() -> str:
    """What multiplies bf16 here; in which order sums are taken depends on it."""
    if has_matrix_unit():
        return "AMX"
    return "AVX512_BF16" if multiplies_pairs() else "fused multiply-adds"
