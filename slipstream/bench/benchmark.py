"""What a benchmark is to the command line: its flags, its measurement, its summary, its verdict.

Every `*_command` module defines one as `BENCHMARK`. Nothing here or there imports torch before the
measurement starts, so `slipstream bench NAME --help` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.bench.record import ResultRow


def _no_summary(args: argparse.Namespace, rows: Sequence[ResultRow]) -> Mapping[str, object]:
    return {}


def _no_verdict(args: argparse.Namespace, rows: Sequence[ResultRow]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark of `slipstream bench`. Each function gets the parsed flags."""

    add_flags: Callable[[argparse.ArgumentParser], None]
    """Adds all flags except `--json` and `--debug`, which every benchmark has."""
    run: Callable[[argparse.Namespace], list[ResultRow]]
    """Measures, prints the rows and returns them. Raises ConfigError for flags that do not go
    together."""
    summary: Callable[[argparse.Namespace, Sequence[ResultRow]], Mapping[str, object]] = _no_summary
    """What `--json` writes in addition to the rows, by key."""
    say: Callable[[argparse.Namespace, Sequence[ResultRow]], int] = _no_verdict
    """Prints a verdict on the rows and returns the exit status: 0, or 1 if a check failed."""
