"""Rows of results: numbers with their spread, and the circumstances that they hold under.

Knows nothing about what is measured. Never imports torch. Used by all benchmarks.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")
"""What decides which matrix kernels a CPU runs."""

PACKAGES = ("slipstream-rl", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One quantity over `n` runs."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=median(values), min=min(values), max=max(values), n=len(values))

    def scaled(self, factor: float) -> Spread:
        """The spread of `factor` times the values, `factor` > 0."""
        return Spread(
            median=factor * self.median, min=factor * self.min, max=factor * self.max, n=self.n
        )


def median_of(value: float | Spread) -> float:
    """The median of what may have been measured once or several times."""
    return value.median if isinstance(value, Spread) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a row was measured. `cores` are those the process may use."""

    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    system: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender in one case.

    `seconds` is the wall time of one run. `values` are derived numbers, named with their unit;
    `settings` is what was run. `dtype` is empty and `threads` None where neither has a meaning.
    """

    benchmark: str
    case: str
    contender: str
    dtype: str
    threads: int | None
    seconds: Spread
    machine: Machine
    values: Mapping[str, float | Spread] = field(default_factory=dict)
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def this_machine(versions_elsewhere: Mapping[str, str] | None = None) -> Machine:
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
    )


def write_rows(path: Path, rows: Sequence[Row], summary: Mapping[str, object] = {}) -> None:
    """Write `{**summary, "rows": [...]}` as JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**summary, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _cpu_fields() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty on systems that have none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
