"""Detect the features of this CPU that the kernels depend on."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from llvmlite import binding

NO_AMX = "SLIPSTREAM_NO_AMX"
"""An environment variable. If it is set to anything but 0, the kernels do not use AMX."""

NO_BF16_BACKWARD = "SLIPSTREAM_NO_BF16_BACKWARD"
"""An environment variable. If it is set to anything but 0, attention's backward pass of a bf16
policy computes in fp32 on CPUs with AVX512_BF16 and without AMX. Otherwise it rounds to bf16, which
is faster (docs/log/training_step.md)."""

_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18
"""Arguments of arch_prctl(2). Linux lets a process use AMX tiles only after this request."""
_ARCH_PRCTL = 158


@cache
def cpu_flags() -> frozenset[str]:
    """Return all words of /proc/cpuinfo, CPU flags among them; empty if it cannot be read."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def is_intel() -> bool:
    """Return whether this is an Intel processor."""
    return "GenuineIntel" in cpu_flags()


@cache
def has_avx512_bf16() -> bool:
    """Return whether the CPU can multiply and add pairs of bf16 (AVX512_BF16)."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@cache
def has_amx() -> bool:
    """Return whether kernels may use AMX with bf16.

    The CPU must have it, the system must permit it, and the environment must not forbid it
    (`NO_AMX`).
    """
    features = binding.get_host_cpu_features()
    if not all(features.get(name, False) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    if is_set(NO_AMX) or platform.system() != "Linux":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def is_set(variable: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def bf16_products() -> str:
    """Return the name of the instructions that multiply bf16 here. They determine the sum order."""
    if has_amx():
        return "AMX"
    return "AVX512_BF16" if has_avx512_bf16() else "fused multiply-adds"
