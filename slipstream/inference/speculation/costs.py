"""What a decode step will take: seconds as a function of running requests and drafts.

A few numbers fit all batch sizes and depths at once, so a batch size that has just come up needs no
measuring of its own:

    seconds = a + b R + c max(R - 8, 0)     R = running * (drafts + 1) rows through the policy
            + [drafts > 0] d + e drafts + f running * drafts     the drafts themselves

No number is below 0. They are fitted to relative errors by least squares in which old steps fade,
those with drafts and those without each as new ones of their kind come.
How a batch size and depth that has been measured differs from that is its own factor, and how the
machine is doing, by which all steps differ for a while, is its mood. How far a step moves either
depends on how well each is known and on how much steps vary (the gains of Kalman 1960): a plan that
was seen often tells of the mood, a new one tells of itself, against what was measured just before.
Both fade towards 1, so that what nothing confirms gives way to what all steps say. Used by
`selector`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

_FADE = 0.999
_KNEE = 8
_REFIT = 64
"""Steps between two fits, at most."""

_PRIOR_WEIGHT = 0.05
_PRIOR_SIZES, _PRIOR_DRAFTS = (1, 4, 16, 64), (0, 1, 3, 7)
_FARTHEST = 2.5
"""A step that took more than so many times what was expected (or less by it) counts as that: what
else runs on the machine disturbs single steps by any factor."""

_SURPRISE = 2.5
"""Standard deviations: more than this a single step is not believed to say."""

# Variances of logarithms.

_NOISE = 0.08**2
"""Of the time of a step, mood and plan being known, before it has been seen."""

_LEAST_NOISE = 0.02**2

_NOISE_STEPS = 50
"""Steps that what is known of the noise is about."""

_MOODY = 0.15**2
"""Of the machine's mood."""

_LASTING = 0.98
"""How much of a mood is left a step later."""

_UNKNOWN = 0.1**2
"""Of how a batch size and depth that was never measured differs from the fit."""

_REMEMBERED = 0.999
"""How much of that difference is left a step later."""


@dataclass(slots=True)
class _Belief:
    """A logarithm, its variance, and the step that it was last of use in."""

    value: float
    variance: float
    step: int = 0

    def fade(self, keep: float, unknown: float) -> None:
        """Time passes: towards 0, of variance `unknown`."""
        self.value *= keep
        self.variance = unknown + keep**2 * (self.variance - unknown)


class StepCosts:
    """Predicts seconds, and learns from those measured."""

    def __init__(self) -> None:
        size = len(_features(1, 0))
        # Of steps without drafts and of those with them: each kind fades with its own steps, for
        # where all steps are of one kind the other's say what the fit can not tell from them.
        self._left, self._right = np.zeros((2, size, size)), np.zeros((2, size))
        self._weights: list[float] = []
        # Seconds by these weights: asked for in every step.
        self._fitted: dict[tuple[int, int], float] = {}
        self._unfitted: tuple[list[list[float]], list[list[float]]] = ([], [])
        self._steps = 0
        # Contexts grow longer, a machine is busy.
        self._mood = _Belief(0.0, _MOODY)
        self._noise = _NOISE
        self._cells: dict[tuple[int, int], _Belief] = {}

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return self._steps > 0

    def seconds(self, running: int, drafts: int, bucket: int) -> float:
        """Of a step of `running` requests, which `bucket` of similar sizes has its own factors."""
        cell = self._cells.get((bucket, drafts))
        own = 0.0 if cell is None else cell.value * _REMEMBERED ** (self._steps - cell.step)
        return exp(self._mood.value + own) * self._shape(running, drafts)

    def record(self, running: int, drafts: int, bucket: int, seconds: float) -> None:
        """A step has taken so many seconds."""
        if not self._steps:
            self._begin(running, seconds)
        expected = self.seconds(running, drafts, bucket)
        off = min(max(seconds / expected, 1 / _FARTHEST), _FARTHEST)
        shape = self._shape(running, drafts)
        target = off * expected / (shape * exp(self._mood.value))
        self._unfitted[drafts > 0].append(
            [x / shape for x in _features(running, drafts)] + [target]
        )
        self._steps += 1
        cell = self._cells.setdefault((bucket, drafts), _Belief(0.0, _UNKNOWN, self._steps))
        cell.fade(_REMEMBERED ** (self._steps - cell.step), _UNKNOWN)
        cell.step = self._steps
        self._mood.fade(_LASTING, _MOODY)
        known = self._mood.variance + cell.variance
        total = known + self._noise
        most = _SURPRISE * sqrt(total)
        surprise = min(max(log(off), -most), most)
        self._noise += (max(surprise**2 - known, _LEAST_NOISE) - self._noise) / _NOISE_STEPS
        for belief in (self._mood, cell):
            gain = belief.variance / total
            belief.value += gain * surprise
            belief.variance *= 1 - gain

    def _begin(self, running: int, seconds: float) -> None:
        for size in _PRIOR_SIZES:
            base = seconds * (1 + 0.05 * size) / (1 + 0.05 * running)
            for drafts in _PRIOR_DRAFTS:
                x = np.array(_features(size, drafts)) / (base * _guessed_factor(size, drafts))
                self._left[int(drafts > 0)] += _PRIOR_WEIGHT * np.outer(x, x)
                self._right[int(drafts > 0)] += _PRIOR_WEIGHT * x

    def _shape(self, running: int, drafts: int) -> float:
        # The more steps there were, the less the next ones change. A fit takes a tenth of a small
        # model's step.
        waiting = sum(map(len, self._unfitted))
        if not self._weights or waiting >= min(1 + self._steps // 8, _REFIT):
            self._take_in()
        known = self._fitted.get((running, drafts))
        if known is None:
            pairs = zip(_features(running, drafts), self._weights, strict=True)
            known = self._fitted[running, drafts] = max(sum(x * w for x, w in pairs), 1e-12)
        return known

    def _take_in(self) -> None:
        for kind, steps in enumerate(self._unfitted):
            if steps:
                *columns, targets = np.array(steps).T
                rows = np.array(columns).T
                kept = _FADE ** np.arange(len(rows) - 1, -1, -1)
                fade = _FADE ** len(rows)
                self._left[kind] = fade * self._left[kind] + rows.T @ (kept[:, None] * rows)
                self._right[kind] = fade * self._right[kind] + rows.T @ (kept * targets)
                steps.clear()
        self._fitted.clear()
        left, right = self._left.sum(0).tolist(), self._right.sum(0).tolist()
        self._weights = _least_squares(left, right, self._weights)


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
