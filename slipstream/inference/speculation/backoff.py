"""Speculation backoff: plain decoding for some rollouts after drafts gained nothing.

A drafter must see requests from their beginning. This, and choosing plans, costs a few per cent of
steps of one or two milliseconds even while nothing is drafted. So a rollout (all requests from the
first that arrives at an idle engine until the engine is idle again) is either drafted for or not.
After rollouts whose drafts gained next to nothing, 1, 2, 4, ... rollouts are decoded plainly.
Used by `selector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MIN_GAIN = 0.05
"""Share of the time that drafts must save. Being ready for drafts costs 2 % of steps of one
millisecond, and the estimated gain is a few per cent too high: plans are chosen by the same
estimate."""

_KEPT = 0.5
"""Weight of earlier trials relative to the last one."""

_LEARNING = 300
"""Steps, at least, in which the selector learns; their gain does not count."""

_TRIAL = 100
"""Steps, at least, before drafts are judged."""

_MOST = 16
"""Most rollouts of one backoff. The first one has one rollout, the next ones two, four ..."""

_OUTLASTED = 4
"""A plain rollout ends its backoff after this many times the steps of the trial: an engine may
never become idle."""


@dataclass(slots=True)
class _Rollouts:
    """Rollouts of about one size."""

    # Since the last judgment; seconds and gain include earlier trials, faded.
    steps: int = 0
    seconds: float = 0.0
    gained: float = 0.0
    learned: bool = False
    # Rollouts of the next backoff; those left of the current one, and most steps of each.
    length: int = 1
    left: int = 0
    limit: int = 0


@dataclass(slots=True)
class Backoff:
    """Sums up the gain of drafts by size of rollouts, as grouped by `bucket_of`."""

    bucket_of: Callable[[int], int]
    _sizes: dict[int, _Rollouts] = field(default_factory=dict)
    _current: _Rollouts = field(default_factory=_Rollouts)
    _skipped: bool = False

    def begin_rollout(self, requests: int) -> int:
        """A rollout of `requests` requests begins, and the one before has ended. Returns for how
        many steps nothing is drafted: 0, or more than the rollout is likely to have."""
        _judge(self._current)
        rollouts = self._current = self._sizes.setdefault(self.bucket_of(requests), _Rollouts())
        self._skipped = rollouts.left > 0
        rollouts.left -= self._skipped
        return rollouts.limit if self._skipped else 0

    def record(self, seconds: float, gained: float = 0.0, steps: int = 1) -> None:
        """`steps` steps took `seconds`. Plain decoding of the same tokens would have taken `gained`
        seconds longer."""
        if not self._skipped:
            self._current.steps += steps
            self._current.seconds += seconds
            self._current.gained += gained

    def drafter_changed(self) -> None:
        """The drafter has new weights: the current backoff is halved."""
        for rollouts in self._sizes.values():
            rollouts.left //= 2


def _judge(rollouts: _Rollouts) -> None:
    if not rollouts.learned:
        if rollouts.steps >= _LEARNING:
            rollouts.learned = True
            rollouts.steps, rollouts.seconds, rollouts.gained = 0, 0.0, 0.0
        return
    if rollouts.steps < _TRIAL:
        return
    if rollouts.gained < _MIN_GAIN * rollouts.seconds:
        rollouts.left, rollouts.limit = rollouts.length, _OUTLASTED * rollouts.steps
        rollouts.length = min(2 * rollouts.length, _MOST)
    else:
        rollouts.length = max(rollouts.length // 2, 1)
    rollouts.steps = 0
    rollouts.seconds *= _KEPT
    rollouts.gained *= _KEPT
