"""Rollouts that nobody drafts for: where drafts gained nothing, more and more of them.

Whoever drafts must see requests from their beginning. That, and choosing a plan, takes a few per
cent of steps of a millisecond or two even while nothing is drafted. So it is decided for all
requests from the first that begins until none is left: a rollout of RL. After rollouts whose drafts
gained next to nothing, some are decoded plainly. Used by `selector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_WORTH = 0.05
"""Share of the time that drafts must be believed to gain. To be ready for them takes two per cent
where steps take a millisecond, and what is believed is too good by a few: drafts are made when it
is."""

_KEPT = 0.5
"""What earlier trials count beside the last one."""

_LEARNING = 300
"""Steps at least in which it is learned what drafts gain: they do not count."""

_TRIAL = 100
"""Steps at least before it is judged what drafts gained."""

_MOST = 16
"""Rollouts of a recess at most. The first one has one, the next ones two, four ..."""

_OUTLASTED = 4
"""A rollout of a recess that takes so many times the steps of the trial is drafted for after all:
requests may come without end."""


@dataclass(slots=True)
class _Rollouts:
    """Of about one size."""

    # Since it was judged last; and in that time and, faded, before.
    steps: int = 0
    seconds: float = 0.0
    gained: float = 0.0
    learned: bool = False
    # Rollouts of the next recess; those left of one that has begun, and most steps of each.
    recess: int = 1
    left: int = 0
    limit: int = 0


@dataclass(slots=True)
class Recess:
    """Adds up what drafts gain. Sizes of rollouts are told apart by `bucket_of`."""

    bucket_of: Callable[[int], int]
    _sizes: dict[int, _Rollouts] = field(default_factory=dict)
    _current: _Rollouts = field(default_factory=_Rollouts)
    _skipped: bool = False

    def begins(self, requests: int) -> int:
        """A rollout of so many requests, and the one before has ended. How many of its steps nobody
        is to draft for: 0, or more than it is likely to have."""
        _judge(self._current)
        rollouts = self._current = self._sizes.setdefault(self.bucket_of(requests), _Rollouts())
        self._skipped = rollouts.left > 0
        rollouts.left -= self._skipped
        return rollouts.limit if self._skipped else 0

    def stepped(self, seconds: float, gained: float = 0.0, steps: int = 1) -> None:
        """So many steps took `seconds`, and `gained` so many over others without drafts that yield
        the same tokens."""
        if not self._skipped:
            self._current.steps += steps
            self._current.seconds += seconds
            self._current.gained += gained

    def drafter_changed(self) -> None:
        """Drafts are others now: it is tried sooner what they gain."""
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
    if rollouts.gained < _WORTH * rollouts.seconds:
        rollouts.left, rollouts.limit = rollouts.recess, _OUTLASTED * rollouts.steps
        rollouts.recess = min(2 * rollouts.recess, _MOST)
    else:
        rollouts.recess = max(rollouts.recess // 2, 1)
    rollouts.steps = 0
    rollouts.seconds *= _KEPT
    rollouts.gained *= _KEPT
