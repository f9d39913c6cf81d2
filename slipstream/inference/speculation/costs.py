"""What a decode step will take: seconds as a function of running requests and draft plan.

A few numbers fit all batch sizes and plans at once, so a batch size that has just come up needs no
measuring of its own:

    seconds = a + b R + c max(R - 8, 0)     R rows through the policy: those that are verified
            + c' max(R - 128, 0)
            + [steps > 0] d + e steps + f S the drafts themselves, of S rows through the drafter

No number is below 0. They are fitted to relative errors by least squares in which old steps fade,
those with drafts and those without each as new ones of their kind come.
How a batch size and plan that has been measured differs from that is its own factor, and how the
machine is doing, by which all steps differ for a while, is its mood. How far a step moves either
depends on how well each is known and on how much steps vary (a filter after Kalman 1960): a plan
that was seen often tells of the mood, a new one tells of itself, against what was measured just
before, and the plan that comes after it tells again how the two differ.
Both fade towards 1, the mood with time, so that what nothing confirms gives way to what all steps
say. Used by `selector`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from operator import mul
from statistics import median

import numpy as np
import numpy.typing as npt

from slipstream.inference.speculation.plan import OFF, DraftPlan

_FADE = 0.999
_KNEES = 8, 128
"""Rows from which on each may take longer: reading the weights hides what those before take, on
a processor that of a few and on an accelerator that of many."""

_REFIT = 64
"""Measurements between two fits, at most."""

_PRIOR_WEIGHT = 0.05
_PRIOR_SIZES, _PRIOR_PLANS = (1, 4, 16, 64), [DraftPlan.chain(depth) for depth in (0, 1, 3, 7)]
_FLAT = 100.0
"""How much more than by what is guessed many rows are held to take no more than few, until they
have been measured."""
_FIRST = 8
"""Steps by whose median what is guessed is scaled: the very first ones may take any time."""

_DOUBT = 3.0
"""Standard deviations of what a row takes that it may take less."""

FARTHEST = 2.5
"""A step that took more than so many times what was expected (or less by it) counts as that: what
else runs on the machine disturbs single steps by any factor."""

_ALONE = 1.5
"""The same, against the median of those that were measured with it."""

_SURPRISE = 2.5
"""Standard deviations: more than this a single step is not believed to say."""

# Variances of logarithms.

_NOISE = 0.08**2
"""Of the time of a step, mood and plan being known, before it has been seen."""

_LEAST_NOISE = 0.02**2
"""A machine that was still for a while may not be so for ever."""

_NOISE_STEPS = 50
"""Measurements that what is known of the noise is about."""

_MOODY = 0.1**2
"""Of the machine's mood: on a shared one, which neighbours slow down for tens of seconds."""

_LASTING = 10.0
"""Seconds after which a mood is e times weaker."""

_UNKNOWN = 0.1**2
"""Of how a batch size and plan that was never measured differs from the fit, before any was: counts
as one that is known."""

_REMEMBERED = 0.999
"""How much of that difference is left a measurement later."""


_Floats = npt.NDArray[np.float64]

_Cell = tuple[int, DraftPlan]


class _Beliefs:
    """Logarithms that are 0 on average, of which any measurement shows a sum of two: the first one,
    the mood, and one of the others, the cells. What is believed of one depends on the others: a
    plan's steps after another's tell how the two differ, whatever the mood. How far cells are apart
    is learned, too."""

    def __init__(self) -> None:
        self._places: dict[_Cell, int] = {}
        # How far cells are apart, as a variance.
        self._apart = _UNKNOWN
        self._values = np.zeros(1)
        self._covariance = np.full((1, 1), _MOODY)

    @property
    def mood(self) -> float:
        """How much longer all steps take."""
        return exp(self._values[0])

    def of(self, cell: _Cell) -> float:
        """Mood and cell together."""
        place = self._places.get(cell)
        return float(self._values[0] + (0.0 if place is None else self._values[place]))

    def pass_time(self, mood_kept: float) -> None:
        """All fade, the mood to `mood_kept` of itself."""
        kept = np.full(len(self._values), _REMEMBERED)
        unknown = np.full(len(kept), self._apart)
        kept[0], unknown[0] = mood_kept, _MOODY
        self._values *= kept
        self._covariance *= kept[:, None] * kept
        self._covariance.flat[:: len(kept) + 1] += (1 - kept**2) * unknown
        self._learn_apart()

    def variance(self, cell: _Cell) -> float:
        """Of mood and cell together."""
        row = self._with_mood(cell)
        return float(row[0] + row[self._places[cell]])

    def learn(self, cell: _Cell, surprise: float, total: float) -> None:
        """The two together were so much more than believed, of which, with the noise of what was
        measured, the variance is `total`."""
        row = self._with_mood(cell)
        gain = row / total
        self._values += gain * surprise
        self._covariance -= gain[:, None] * row

    def _learn_apart(self) -> None:
        """From the cells that are known, each by as much as it is (empirical Bayes, Morris 1983):
        were they held to be farther apart than they are, the noise of few steps would pass for such
        a difference; were they held to be nearer, a true one would."""
        left = self._covariance.diagonal()[1:]
        told = np.maximum(1 - left / self._apart, 0.0) ** 2
        found = float(told @ (self._values[1:] ** 2 + left))
        self._apart = (_UNKNOWN + found) / (1 + float(told.sum()))

    def _with_mood(self, cell: _Cell) -> _Floats:
        if cell not in self._places:
            count = self._places[cell] = len(self._values)
            self._values = np.append(self._values, 0.0)
            wider = np.zeros((count + 1, count + 1))
            wider[:count, :count] = self._covariance
            wider[count, count] = self._apart
            self._covariance = wider
        row: _Floats = self._covariance[0] + self._covariance[self._places[cell]]
        return row


class StepCosts:
    """Predicts seconds, and learns from those measured."""

    def __init__(self) -> None:
        size = len(_features(1, OFF))
        # Of steps without drafts and of those with them: each kind fades with its own steps, for
        # where all steps are of one kind the other's say what the fit can not tell from them.
        self._left, self._right = np.zeros((2, size, size)), np.zeros((2, size))
        # What the first steps took of what is guessed.
        self._scales: list[float] = []
        self._weights: list[float] = []
        # Their covariance, but for the noise of what was measured.
        self._unsure = np.zeros((size, size))
        # Seconds by these weights: asked for in every step.
        self._fitted: dict[tuple[int, DraftPlan, float | None], float] = {}
        self._unfitted: tuple[list[list[float]], list[list[float]]] = ([], [])
        self._measured = 0
        # Contexts grow longer, a machine is busy.
        self._beliefs = _Beliefs()
        self._noise = _NOISE

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return self._measured > 0

    def seconds(
        self, running: int, plan: DraftPlan, bucket: int, drafts: float | None = None
    ) -> float:
        """Of a step of `running` requests, which `bucket` of similar sizes has its own factors.
        `drafts` of a request are verified, on average: by default as many as the plan has."""
        return self._factor(plan, bucket) * self._shape(running, plan, drafts)

    def row_at_least(self, running: int, plan: DraftPlan, drafts: float | None = None) -> float:
        """Seconds that one more row through the policy takes, as far as that is beyond doubt: where
        only chains of one batch size were measured, it may be the drafts that take so long."""
        self._shape(running, plan, drafts)
        rows = _rows(running, plan, drafts)
        beyond = [float(rows > knee) for knee in _KNEES]
        kind = np.zeros(len(self._weights))
        kind[1 : 2 + len(beyond)] = [1.0, *beyond]
        doubt = sqrt(self._noise * float(kind @ self._unsure @ kind))
        return self._beliefs.mood * max(float(kind @ self._weights) - _DOUBT * doubt, 0.0)

    def record(
        self,
        bucket: int,
        plan: DraftPlan,
        steps: Sequence[tuple[int, float]],
        elapsed: float | None = None,
        drafts: float | None = None,
    ) -> None:
        """Each of `steps`, one after the other, of so many running requests, all of `bucket`, has
        taken so many seconds, `drafts` of a request being verified in it, as in `seconds`. Since
        the last steps that were recorded, these included, `elapsed` seconds have gone by: by
        default, what these took."""
        for running, seconds in steps[: _FIRST - len(self._scales)]:
            self._scales.append(seconds / _guess(running, plan))
        factor, count = self._factor(plan, bucket), len(steps)
        expected = [factor * self._shape(running, plan, drafts) for running, _ in steps]
        ratios = [
            min(max(seconds / guess, 1 / FARTHEST), FARTHEST)
            for (_, seconds), guess in zip(steps, expected, strict=True)
        ]
        if count > 2:
            typical = median(ratios)
            ratios = [min(max(x, typical / _ALONE), typical * _ALONE) for x in ratios]
        off = sum(map(mul, ratios, expected)) / sum(expected)
        size = sum(running for running, _ in steps) / count
        shape = sum(expected) / count / factor
        target = off * factor / self._beliefs.mood
        features = _features(size, plan, drafts)
        self._unfitted[plan != OFF].append([x / shape for x in features] + [target])
        self._measured += 1
        if elapsed is None:
            elapsed = sum(seconds for _, seconds in steps)
        self._beliefs.pass_time(exp(-elapsed / _LASTING))
        known = self._beliefs.variance((bucket, plan))
        most = _SURPRISE * count * sqrt(known + self._noise / count)
        surprise = min(max(log(off), -most), most)
        noise = max(count * (surprise**2 - known), _LEAST_NOISE)
        self._noise += (noise - self._noise) / _NOISE_STEPS
        self._beliefs.learn((bucket, plan), surprise, known + self._noise / count)

    def _factor(self, plan: DraftPlan, bucket: int) -> float:
        return exp(self._beliefs.of((bucket, plan)))

    def _shape(self, running: int, plan: DraftPlan, drafts: float | None) -> float:
        # The more steps there were, the less the next ones change. A fit takes a tenth of a small
        # model's step.
        waiting = sum(map(len, self._unfitted))
        if not self._weights or waiting >= min(1 + self._measured // 8, _REFIT):
            self._take_in()
        known = self._fitted.get((running, plan, drafts))
        if known is None:
            pairs = zip(_features(running, plan, drafts), self._weights, strict=True)
            known = self._fitted[running, plan, drafts] = max(sum(x * w for x, w in pairs), 1e-12)
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
        scale = median(self._scales)
        guessed = np.array(
            [
                np.array(_features(size, plan)) / (scale * _guess(size, plan))
                for size in _PRIOR_SIZES
                for plan in _PRIOR_PLANS
            ]
        )
        left = self._left.sum(0) + _PRIOR_WEIGHT * guessed.T @ guessed
        # What is guessed of many rows is no reason not to try them.
        last = len(_KNEES) + 1
        left[last, last] += _FLAT * _PRIOR_WEIGHT * float(np.square(guessed[:, last]).sum())
        right = self._right.sum(0) + _PRIOR_WEIGHT * guessed.sum(0)
        self._weights = _least_squares(left, right).tolist()
        self._unsure = np.linalg.inv(left)


def _least_squares(left: _Floats, right: _Floats) -> _Floats:
    """The x >= 0 that solves left x = right best: nothing makes a step faster, and a sign that
    noise has turned would mislead far from where it was measured. `left` is positive definite.

    Which are 0 is found by exchange of the last one that is wrong, which ends (Murty 1974)."""
    free = np.ones(len(right), dtype=bool)
    x = np.zeros(len(right))
    for _ in range(2 ** len(right)):
        x[:] = 0.0
        x[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        wrong = np.flatnonzero(np.where(free, x < 0, left @ x < right * (1 - 1e-9)))
        if not len(wrong):
            break
        free[wrong[-1]] = not free[wrong[-1]]
    # Rounding may leave two that exchange for ever, about 0.
    return np.maximum(x, 0.0)


def _features(running: float, plan: DraftPlan, drafts: float | None = None) -> tuple[float, ...]:
    rows = _rows(running, plan, drafts)
    drafting = float(plan != OFF)
    beyond = (max(rows - knee, 0) for knee in _KNEES)
    return 1.0, rows, *beyond, drafting, plan.steps, running * plan.draft_rows


def _rows(running: float, plan: DraftPlan, drafts: float | None) -> float:
    return running * (plan.verify_tokens if drafts is None else 1 + drafts)


def _guess(size: int, plan: DraftPlan) -> float:
    """Seconds, of a step without drafts of no requests, before any have been seen."""
    row = 0.01 + 0.01 * size
    more = 0.03 * plan.steps + row * (plan.verify_tokens - 1 + plan.draft_rows)
    return (1 + 0.05 * size) * (1 + (0.15 + more if plan != OFF else 0.0))
