"""Measures seconds per stage of a step.

Knows nothing of what the stages do. Called by the loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Timers:
    """Accumulates wall seconds per name until `collect` is called.

    Spans with different names may nest or overlap; each one counts its whole duration.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the body to `name`, also if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds that were counted under `source` to `target`."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def collect(self) -> dict[str, float]:
        """Return `timing_s/<name>` in seconds since the last call, and reset all names."""
        out = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return out


def timing_per_token(timings: dict[str, float], tokens: dict[str, int]) -> dict[str, float]:
    """Return `timing_per_token_ms/<name>` for each stage in `tokens` that was timed.

    `timings` comes from `Timers.collect`; `tokens` has the number of tokens by stage. Stages
    without tokens are omitted.
    """
    return {
        f"timing_per_token_ms/{name}": 1000.0 * timings[f"timing_s/{name}"] / count
        for name, count in tokens.items()
        if count > 0 and f"timing_s/{name}" in timings
    }


STEP_PARTS = (
    "gen",
    "tools",
    "reward",
    "adv",
    "old_log_prob",
    "ref",
    "values",
    "update_critic",
    "update_actor",
    "sync",
    "drafter",
)
"""Stages of an RL step. No two of them overlap."""


def step_split(timings: dict[str, float]) -> dict[str, float]:
    """Return `timings` plus `timing_s/other`, the time of `timing_s/step` outside all stages."""
    parts = sum(timings.get(f"timing_s/{name}", 0.0) for name in STEP_PARTS)
    return {**timings, "timing_s/other": timings["timing_s/step"] - parts}


def gen_split(timings: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `timings` plus `timing_s/gen/wait`, the time of generation in which engines were idle.

    Only if `metrics` has engine times (`timing_s/gen/*`); otherwise `timings` is unchanged.
    """
    parts = [value for name, value in metrics.items() if name.startswith("timing_s/gen/")]
    if not parts:
        return timings
    return {**timings, "timing_s/gen/wait": timings["timing_s/gen"] - sum(parts)}


class IdleCores:
    """Measures core-seconds that this process left unused during the last `watched` body.

    A thread that busy-waits for another one counts as using its core.
    """

    def __init__(
        self,
        cores: int,
        clock: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        """`cores` is how many the process may use. `used` returns its CPU seconds on all cores."""
        self._cores, self._clock, self._used = cores, clock, used
        self.seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the body; the result is in `seconds`."""
        clock, used = self._clock(), self._used()
        yield
        self.seconds = max(0.0, self._cores * (self._clock() - clock) - (self._used() - used))
