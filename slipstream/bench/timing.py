"""Interleaved runs of contenders, so that other load on the machine slows all of them equally.

Used by all benchmarks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from slipstream.bench.record import Spread


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one contender, one entry per round.

    `cpu` is the sum over its threads. On a busy machine it varies less than `wall`.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    cpu_clocks: Mapping[str, Callable[[], float]] = MappingProxyType({}),
) -> dict[str, Times]:
    """Run all contenders once per round; return their times, without `warm_up` rounds.

    `cpu_clocks` return the CPU seconds of contenders that compute in other processes. Every other
    round runs the contenders in reverse order, so none always follows the same one.
    """
    times = {name: Times() for name in contenders}
    for number in range(warm_up + rounds):
        order = list(contenders)
        for name in order if number % 2 == 0 else reversed(order):
            cpu_clock = cpu_clocks.get(name, time.process_time)
            wall, cpu = time.perf_counter(), cpu_clock()
            contenders[name]()
            wall, cpu = time.perf_counter() - wall, cpu_clock() - cpu
            if number >= warm_up:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """`above / below`, round by round: load that slowed both in the same round cancels out."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def step_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The median of `above / below` over interleaved steps, and its relative standard error.

    The error is that of a median of normally distributed values. The standard deviation is
    estimated from the median absolute deviation.
    """
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    middle = median(logs)
    deviation = 1.4826 * median(abs(log - middle) for log in logs)
    return math.exp(middle), 1.2533 * deviation / math.sqrt(len(logs))
