"""What a run or a measurement was made on: processor, system, versions. Never imports torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")
"""What decides which matrix kernels a CPU runs."""

PACKAGES = ("slipstream-rl", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a row was measured. `cores` are those the process may use."""

    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    system: str
    versions: Mapping[str, str]
    gpu: str = ""
    """What computed, where that was a GPU."""


def this_machine(versions_elsewhere: Mapping[str, str] | None = None, *, gpu: str = "") -> Machine:
    """Processor, its features, and the versions in use; packages that are missing are left out. A
    peer in an environment of its own brings its `versions_elsewhere`."""
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
    """The first processor's entries in /proc/cpuinfo; empty on systems that have none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
