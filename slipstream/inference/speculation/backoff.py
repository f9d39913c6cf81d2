"""Speculation backoff: plain decoding for some rollouts after drafts gained nothing.

A drafter must process requests from their first token. This and the choice of plans cost a few per
cent of the time, with steps of one or two milliseconds, even if nothing is drafted. So drafting is
switched on or off for whole rollouts. A rollout is all requests from the first one that arrives at
an idle engine until the engine is idle again. After rollouts whose drafts gained almost nothing, 1,
2, 4, ... rollouts are decoded without drafts. Used by `selector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MIN_GAIN = 0.05
"""Share of the time that drafts must save. Readiness for drafts costs 2 % with steps of one
millisecond. The estimated gain is a few per cent too high, because plans are chosen by the same
estimate."""

_KEPT = 0.5
"""Weight of earlier trials relative to the last one."""

_LEARNING = 300
"""Least number of first steps in which the selector learns. Their gain does not count."""

_TRIAL = 100
"""Least number of steps before the gain of drafts is judged."""

_MOST = 16
"""Most rollouts of one backoff. The first backoff has one rollout, the next ones two, four ..."""

_LIMIT_FACTOR = 4
"""A rollout without drafts ends its backoff after this many times the steps of the trial, because
an engine may never become idle."""


@dataclass(slots=True)
class _Rollouts:
    """State of rollouts of about one size."""

    # Sums since the last judgment. Seconds and gain include earlier trials with less weight.
    steps: int = 0
    seconds: float = 0.0
    gained: float = 0.0
    learned: bool = False
    # Rollouts of the next backoff; rollouts left in the current one; most steps of each.
    length: int = 1
    left: int = 0
    limit: int = 0


@dataclass(slots=True)
class Backoff:
    """Decides for each rollout whether to draft. Gains are summed by the size of rollouts, grouped
    by `bucket_of`."""

    bucket_of: Callable[[int], int]
    _sizes: dict[int, _Rollouts] = field(default_factory=dict)
    _current: _Rollouts = field(default_factory=_Rollouts)
    _skipped: bool = False

    def begin_rollout(self, requests: int) -> int:
        """Judge the last rollout and start one of `requests` requests. Returns the number of steps
        to decode without drafts: 0, or more than the rollout is likely to have."""
        _judge(self._current)
        rollouts = self._current = self._sizes.setdefault(self.bucket_of(requests), _Rollouts())
        self._skipped = rollouts.left > 0
        rollouts.left -= self._skipped
        return rollouts.limit if self._skipped else 0

    def record(self, seconds: float, gained: float = 0.0, steps: int = 1) -> None:
        """Add `steps` steps that took `seconds`. Without drafts, the same tokens would have taken
        `gained` seconds longer."""
        if not self._skipped:
            self._current.steps += steps
            self._current.seconds += seconds
            self._current.gained += gained

    def drafter_changed(self) -> None:
        """Halve the current backoffs, because the drafter has new weights."""
        for rollouts in self._sizes.values():
            rollouts.left //= 2


def _judge(rollouts: _Rollouts) -> None:
    """Start a backoff if drafts gained too little; otherwise shorten the next one."""
    if not rollouts.learned:
        if rollouts.steps >= _LEARNING:
            rollouts.learned = True
            rollouts.steps, rollouts.seconds, rollouts.gained = 0, 0.0, 0.0
        return
    if rollouts.steps < _TRIAL:
        return
    if rollouts.gained < _MIN_GAIN * rollouts.seconds:
        rollouts.left, rollouts.limit = rollouts.length, _LIMIT_FACTOR * rollouts.steps
        rollouts.length = min(2 * rollouts.length, _MOST)
    else:
        rollouts.length = max(rollouts.length // 2, 1)
    rollouts.steps = 0
    rollouts.seconds *= _KEPT
    rollouts.gained *= _KEPT
