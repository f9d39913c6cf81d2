"""When nobody is to draft at all: where drafts gained nothing, for longer and longer.

Whoever drafts must see requests from their beginning. That, and choosing a plan, takes a few per
cent of steps of a millisecond or two even while nothing is drafted. So requests are looked at
together, from the first that begins until none is left: a rollout of RL. A rollout whose drafts
gained next to nothing is followed by others that are decoded plainly. Used by `selector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_WORTH = 0.02
"""Share of the time that drafts must gain: about what it takes to be ready for them."""

_TRIAL = 100
"""Steps at least, before it is judged what drafts gained."""

_LONGEST = 16
"""Trials that a recess lasts as long as, at most; at first one, then two, four ..."""


@dataclass(slots=True)
class _Trial:
    """Of rollouts whose largest batch was of about one size: what drafts gained in them since it
    was judged last."""

    steps: int = 0
    seconds: float = 0.0
    gained: float = 0.0
    # How long the next recess is, in trials, and how many steps are left of one that has begun.
    length: int = 1
    left: int = 0


@dataclass(slots=True)
class Recess:
    """Counts what steps took and gained, and says when to rest. Sizes of batches are told apart by
    `bucket_of`."""

    bucket_of: Callable[[int], int]
    _trials: dict[int, _Trial] = field(default_factory=dict)
    # Of the requests that there are now: the most that ran together, and since they began.
    _most: int = 0
    _steps: int = 0
    _seconds: float = 0.0
    _gained: float = 0.0
    _rested: bool = False
    _current: _Trial = field(default_factory=_Trial)

    def rests(self, running: int) -> bool:
        """Whether the next step, of so many requests, is part of a recess. Asked once a step."""
        self._steps += 1
        if running > self._most:
            self._most = running
            self._current = self._trials.setdefault(self.bucket_of(running), _Trial())
        if not self._current.left:
            return False
        self._current.left -= 1
        self._rested = True
        return True

    def stepped(self, seconds: float, gained: float = 0.0) -> None:
        """A step that was no part of one took `seconds`, and `gained` so many over others without
        drafts that yield the same tokens."""
        self._seconds += seconds
        self._gained += gained

    def ended(self) -> None:
        """No request is left."""
        trial = self._current
        if self._rested:
            # Better too short than to end among requests that nobody has seen from the beginning.
            trial.left = trial.left if trial.left >= self._steps else 0
        else:
            trial.steps += self._steps
            trial.seconds += self._seconds
            trial.gained += self._gained
            if trial.steps >= _TRIAL:
                _judge(trial)
        self._most, self._steps, self._seconds, self._gained = 0, 0, 0.0, 0.0
        self._rested, self._current = False, _Trial()

    def drafter_changed(self) -> None:
        """Drafts are others now: it is tried sooner what they gain."""
        for trial in self._trials.values():
            trial.left, trial.length = 0, max(trial.length // 2, 1)


def _judge(trial: _Trial) -> None:
    if trial.gained < _WORTH * trial.seconds:
        trial.left = trial.length * trial.steps
        trial.length = min(2 * trial.length, _LONGEST)
    else:
        trial.length = max(trial.length // 2, 1)
    trial.steps, trial.seconds, trial.gained = 0, 0.0, 0.0
