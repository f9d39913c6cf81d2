"""How benchmarks print rows: a heading with the circumstances, then one value per line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from slipstream.bench.record import ResultRow, Spread


def progress(line: str) -> None:
    """Print a line on standard error at once: a benchmark may be silent for minutes otherwise."""
    print(line, file=sys.stderr, flush=True)


def print_rows(title: str, rows: Sequence[ResultRow]) -> None:
    """Print the heading, and all values of each contender."""
    print_heading(title, rows)
    for row in rows:
        print(f"  {row.contender}")
        print_values({"seconds": row.seconds, **row.values})


def print_heading(title: str, rows: Sequence[ResultRow]) -> None:
    """Print machine, versions and settings, which all rows share, and the versions of peers."""
    first = rows[0]
    machine = first.machine
    versions = " ".join(f"{name} {number}" for name, number in machine.versions.items())
    flags = " ".join(machine.cpu_flags)
    compute = f"{first.dtype}, {first.threads} threads; " if first.threads is not None else ""
    gpu = f"{machine.gpu}; " if machine.gpu else ""
    print(f"\n{title}: {compute}{gpu}{machine.cpu} [{flags}], {machine.cores} cores; {versions}")
    theirs = {tuple(row.machine.versions.items()): None for row in rows}
    for others in [found for found in theirs if found != tuple(machine.versions.items())]:
        print("  peer: " + " ".join(f"{name} {number}" for name, number in others))
    if first.settings:
        print("  " + " ".join(f"{name}={value}" for name, value in first.settings.items()))
    print(f"  median [least .. most] of {first.seconds.n} interleaved runs")


def print_values(values: Mapping[str, float | Spread]) -> None:
    """Print one value per line."""
    for name, value in values.items():
        print(f"    {name:<32} {shown(value)}")
    # The next case may take minutes; without a flush a file or pipe shows nothing until then.
    sys.stdout.flush()


def shown(value: float | Spread) -> str:
    """A number as text; a spread as median [least .. most]."""
    if isinstance(value, Spread):
        return f"{value.median:.4g} [{value.min:.4g} .. {value.max:.4g}]"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def verdict(missed: Sequence[str], *, reached: str = "reached") -> str:
    """`reached`, or which floors were missed."""
    return f"missed: {'; '.join(missed)}" if missed else reached
