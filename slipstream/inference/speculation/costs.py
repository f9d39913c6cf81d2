"""What a decode step will take: seconds as a function of running requests and drafts.

A few numbers fit all batch sizes and depths at once, so a batch size that has just come up needs no
measuring of its own:

    seconds = a + b R + c max(R - 8, 0)     R = running * (drafts + 1) rows through the policy
            + [drafts > 0] d + e drafts + f running * drafts     the drafts themselves

No number is below 0. They are fitted to relative errors by least squares in which old steps fade;
what one batch size and depth then still differ by is learned beside it. Used by `selector`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np

_FADE = 0.998
_KNEE = 8
_PRIOR_WEIGHT = 0.05
_PRIOR_SIZES, _PRIOR_DRAFTS = (1, 4, 16, 64), (0, 1, 3, 7)
_FARTHEST = 2.5
"""A step that took more than so many times what was expected (or less by it) counts as that: what
else runs on the machine disturbs single steps by any factor."""


_DOUBT = 0.25
"""How far, as a logarithm, one step may move what is believed of its batch size and depth."""

_FOLLOW = 0.12
"""How much of what a step is off by is held to be the machine's mood, which all steps share. Moods
last for tens of steps; followed more slowly they are taken for what the current plan costs."""

_KEPT = 0.98
"""What is left of a step's say about its batch size and depth after each further one of them."""


@dataclass(slots=True)
class _Cell:
    """What one batch size and depth differ by, as a logarithm, from so many steps."""

    total: float = 0.0
    count: float = 0.0

    @property
    def factor(self) -> float:
        return exp(self.total / (self.count + 4))


class StepCosts:
    """Predicts seconds, and learns from those measured."""

    def __init__(self) -> None:
        size = len(_features(1, 0))
        self._left, self._right = np.zeros((size, size)), np.zeros(size)
        self._weights: list[float] = []
        self._unfitted: list[list[float]] = []
        self._steps = 0
        # Follows what all steps share: contexts grow longer, a machine is busy.
        self._scale = 1.0
        self._cells: dict[tuple[int, int], _Cell] = {}

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return self._steps > 0

    def seconds(self, running: int, drafts: int, bucket: int) -> float:
        """Of a step of `running` requests, which `bucket` of similar sizes has its own factors."""
        cell = self._cells.get((bucket, drafts))
        return self._scale * self._shape(running, drafts) * (cell.factor if cell else 1.0)

    def record(self, running: int, drafts: int, bucket: int, seconds: float) -> None:
        """A step has taken so many seconds."""
        if not self._steps:
            self._begin(running, seconds)
        expected = self.seconds(running, drafts, bucket)
        off = min(max(seconds / expected, 1 / _FARTHEST), _FARTHEST)
        shape = off * expected / self._scale
        self._unfitted.append([x / shape for x in _features(running, drafts)])
        self._scale *= off**_FOLLOW
        cell = self._cells.setdefault((bucket, drafts), _Cell())
        cell.total = _KEPT * cell.total + min(max(log(off), -_DOUBT), _DOUBT)
        cell.count = _KEPT * cell.count + 1
        self._steps += 1

    def _begin(self, running: int, seconds: float) -> None:
        for size in _PRIOR_SIZES:
            base = seconds * (1 + 0.05 * size) / (1 + 0.05 * running)
            for drafts in _PRIOR_DRAFTS:
                x = np.array(_features(size, drafts)) / (base * _guessed_factor(size, drafts))
                self._left += _PRIOR_WEIGHT * np.outer(x, x)
                self._right += _PRIOR_WEIGHT * x

    def _shape(self, running: int, drafts: int) -> float:
        if not self._weights or len(self._unfitted) >= (1 if self._steps < 32 else 16):
            self._take_in()
        return max(self._fit(running, drafts), 1e-12)

    def _take_in(self) -> None:
        if self._unfitted:
            rows = np.array(self._unfitted)
            kept = _FADE ** np.arange(len(rows) - 1, -1, -1)
            self._left = _FADE ** len(rows) * self._left + rows.T @ (kept[:, None] * rows)
            self._right = _FADE ** len(rows) * self._right + rows.T @ kept
            self._unfitted.clear()
        self._weights = _least_squares(self._left.tolist(), self._right.tolist(), self._weights)

    def _fit(self, running: int, drafts: int) -> float:
        pairs = zip(_features(running, drafts), self._weights, strict=True)
        return sum(x * w for x, w in pairs)


def _least_squares(left: list[list[float]], right: list[float], start: list[float]) -> list[float]:
    """The x >= 0 that solves left x = right best, coordinate by coordinate: nothing makes a step
    faster, and a sign that noise has turned would mislead far from where it was measured."""
    x = list(start) if start else [0.0] * len(right)
    for _ in range(30):
        for i, row in enumerate(left):
            rest = right[i] - sum(a * b for a, b in zip(row, x, strict=True)) + row[i] * x[i]
            x[i] = max(rest / row[i], 0.0) if row[i] > 0 else 0.0
    return x


def _features(running: int, drafts: int) -> tuple[float, ...]:
    rows = running * (drafts + 1)
    return 1.0, rows, max(rows - _KNEE, 0), float(drafts > 0), drafts, running * drafts


def _guessed_factor(size: int, drafts: int) -> float:
    """Seconds over those without drafts, before any have been seen."""
    return 1 + (0.15 + drafts * (0.05 + 0.02 * size) if drafts else 0.0)
