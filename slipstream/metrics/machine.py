"""Describes the machine of a run or measurement: CPU, system, versions. Never imports torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")
"""CPU features that decide which matrix kernels can run."""

PACKAGES = ("slipstream-rl", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and software of a measurement. `cores`: CPU cores that the process may use."""

    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    system: str
    versions: Mapping[str, str]
    gpu: str = ""
    """Name of the GPU that computed; empty for a CPU."""


def this_machine(versions_elsewhere: Mapping[str, str] | None = None, *, gpu: str = "") -> Machine:
    """Return CPU, its features, and package versions; packages that are not installed are omitted.

    `versions_elsewhere` replaces the versions, for a measurement in another Python environment.
    """
    fields = _cpu_fields()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        cpu=fields.get("model name", platform.processor() or platform.machine()),
        cpu_flags=tuple(flag for flag in FLAGS_OF_INTEREST if flag in flags),
        cores=cores or 1,
        system=f"{platform.system()} {platform.machine()}",
        versions=versions_elsewhere or versions,
        gpu=gpu,
    )


def _cpu_fields() -> dict[str, str]:
    """Return the entries of the first CPU in /proc/cpuinfo; empty if that file is missing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
