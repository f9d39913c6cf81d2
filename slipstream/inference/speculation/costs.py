"""What a decode step will take: seconds as a function of running requests and drafts.

A few numbers fit all batch sizes and depths at once, so a batch size that has just come up needs no
measuring of its own:

    seconds = a + b R + c max(R - 8, 0)     R = running * (drafts + 1) rows through the policy
            + [drafts > 0] d + e drafts + f running * drafts     the drafts themselves

They are fitted to relative errors by least squares in which old steps fade; what one batch size and
depth then still differ by is learned beside it. Used by `selector`.
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
        self._weights: np.ndarray | None = None
        self._unfitted = 0
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
        x = _features(running, drafts) / (off * expected / self._scale)
        self._left *= _FADE
        self._right *= _FADE
        self._left += np.outer(x, x)
        self._right += x
        self._scale *= off**0.05
        cell = self._cells.setdefault((bucket, drafts), _Cell())
        cell.total = 0.97 * cell.total + min(max(log(off), -_DOUBT), _DOUBT)
        cell.count = 0.97 * cell.count + 1
        self._steps += 1
        self._unfitted += 1

    def _begin(self, running: int, seconds: float) -> None:
        for size in _PRIOR_SIZES:
            base = seconds * (1 + 0.05 * size) / (1 + 0.05 * running)
            for drafts in _PRIOR_DRAFTS:
                x = _features(size, drafts) / (base * _guessed_factor(size, drafts))
                self._left += _PRIOR_WEIGHT * np.outer(x, x)
                self._right += _PRIOR_WEIGHT * x

    def _shape(self, running: int, drafts: int) -> float:
        if self._weights is None or self._unfitted >= (1 if self._steps < 32 else 8):
            ridge = 1e-9 * np.trace(self._left) * np.eye(len(self._right))
            self._weights = np.linalg.solve(self._left + ridge, self._right)
            self._unfitted = 0
        plain = float(_features(running, 0) @ self._weights)
        # The fit knows nothing of signs, and is not to be believed far from what was measured.
        plain = max(plain, 1e-3 * float(np.abs(self._weights).max()), 1e-9)
        if not drafts:
            return plain
        return max(float(_features(running, drafts) @ self._weights), 1.02 * plain)


def _features(running: int, drafts: int) -> np.ndarray:
    rows = running * (drafts + 1)
    return np.array(
        [1, rows, max(rows - _KNEE, 0), drafts > 0, drafts, running * drafts], dtype=np.float64
    )


def _guessed_factor(size: int, drafts: int) -> float:
    """Seconds over those without drafts, before any have been seen."""
    return 1 + (0.15 + drafts * (0.05 + 0.02 * size) if drafts else 0.0)
