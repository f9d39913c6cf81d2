"""Contenders run in turns, so that whatever else the machine does falls on all of them alike.

Knows nothing about what it times. Used by all benchmarks.
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

    `cpu` adds up the threads that work for it: on a busy machine it moves less than `wall` does.
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
    """The times of each contender, after `warm_up` rounds that are not counted.

    `cpu_clocks` tell the CPU seconds of contenders that compute in other processes than this one.
    Every other round goes through the contenders backwards: none always follows the same one.
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
    """`above / below` round by round: what both shared in a round cancels."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def step_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The median of `above / below`, of steps that were taken in turns, and its standard error as a
    share of it: that of a median of what is spread normally, from the median deviation."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    middle = median(logs)
    deviation = 1.4826 * median(abs(log - middle) for log in logs)
    return math.exp(middle), 1.2533 * deviation / math.sqrt(len(logs))
