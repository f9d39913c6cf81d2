"""Seconds per stage of a step.

Knows nothing of what the stages do. Called by the loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Timers:
    """Accumulates wall seconds per name until they are collected.

    Spans of different names may nest or overlap; each counts its whole duration.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the body to `name`, also where it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count as `target` what was measured as part of `source`."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def collect(self) -> dict[str, float]:
        """`timing_s/<name>` in seconds since the last call, which starts them anew."""
        out = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return out


def timing_per_token(timings: dict[str, float], tokens: dict[str, int]) -> dict[str, float]:
    """`timing_per_token_ms/<name>` for each stage in `tokens` that was timed.

    `timings`: what `Timers.collect` returned; `tokens`: tokens by stage. A stage without tokens is
    left out.
    """
    return {
        f"timing_per_token_ms/{name}": 1000.0 * timings[f"timing_s/{name}"] / count
        for name, count in tokens.items()
        if count > 0 and f"timing_s/{name}" in timings
    }


STEP_PARTS = (
    "gen",
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
"""Stages of which no two overlap, and which lie in an RL step."""


def step_split(timings: dict[str, float]) -> dict[str, float]:
    """`timings`, which has `timing_s/step`, and `timing_s/other`: what no stage of it took."""
    parts = sum(timings.get(f"timing_s/{name}", 0.0) for name in STEP_PARTS)
    return {**timings, "timing_s/other": timings["timing_s/step"] - parts}


def gen_split(timings: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """`timings` and, where `metrics` has what an engine did (`timing_s/gen/*`), the time in which
    it did nothing: `timing_s/gen/wait`."""
    parts = [value for name, value in metrics.items() if name.startswith("timing_s/gen/")]
    if not parts:
        return timings
    return {**timings, "timing_s/gen/wait": timings["timing_s/gen"] - sum(parts)}


class IdleCores:
    """Core-seconds that this process left unused in the last body of `watched`.

    A thread that waits in a loop for another uses its core.
    """

    def __init__(
        self,
        cores: int,
        clock: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        """Of `cores` that it may use; `used` counts seconds of all of them."""
        self._cores, self._clock, self._used = cores, clock, used
        self.seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the body."""
        clock, used = self._clock(), self._used()
        yield
        self.seconds = max(0.0, self._cores * (self._clock() - clock) - (self._used() - used))
