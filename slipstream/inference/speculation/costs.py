"""Predicts the seconds of a decode step from the number of running requests and the draft plan.

A linear function of T, the tokens per forward pass of the policy, and S, the tokens per forward
pass of the drafter, is fitted to all steps. So it also predicts batch sizes and plans that never
ran:

    seconds = a + b T + c max(T - 8, 0) + c' max(T - 128, 0)
            + [drafts] (d + e steps + f S)

All weights are at least 0. They minimize squared relative errors; older steps have less weight.
Each measured pair of batch size and plan also has its own mean. With more steps of a pair, its
prediction moves from the fit to this mean. One factor for all plans follows the speed of the
machine, which other programs change for seconds at a time. Used by `selector`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from slipstream.inference.speculation.plan import OFF, DraftPlan

_KNEES = 8, 128
"""Tokens per forward pass beyond which a token may cost more. The first tokens are cheap because
the time to read the weights hides them: a few on a CPU, about a hundred on a GPU."""

_FIT_FADE = 0.999
"""Factor on a step's weight in the fit, for each later step of its kind (with or without
drafts)."""

_COUNT_FADE = 0.998
"""Factor on the step count of a plan, for each later step of its batch size."""

_MOST_STEPS = 32.0
"""Most steps in the mean of a plan. With more, the mean follows the machine too slowly."""

_AT_ONCE = 8
"""Most steps of one `record` call that count for the mean, because their errors have common
causes."""

_FIT_STEPS = 4.0
"""With this many steps, the mean of a plan has the same weight as the fit."""

_SPEED_GAIN = 0.05
"""Share of the error of a well-measured plan that is attributed to the machine's speed, per
step."""

_SPEED_FADE = 0.995
"""Factor on the logarithm of the speed factor, per step: it returns to the usual speed."""

OUTLIER = 2.5
"""Largest factor between measured and predicted seconds that counts: beyond it, another program
disturbed the step."""

_DISTURBED = 1.5
"""Largest factor between the seconds of a step and the median of its `record` call that counts."""

_NOISE = 0.08
"""Standard deviation of the relative error of one step, for the lower bound of a token's cost."""

_REFIT_SHARE, _REFIT = 8, 16
"""The fit is updated after `_REFIT` records, or after 1 / `_REFIT_SHARE` of all records if these
are fewer."""

_PRIOR_WEIGHT = 0.05
_PRIOR_SIZES, _PRIOR_PLANS = (1, 4, 16, 64), [DraftPlan.chain(depth) for depth in (0, 1, 3, 7)]
_FLAT = 5.0
"""Weight of the prior that tokens beyond the last knee cost nothing extra."""

_FIRST = 8
"""Number of first steps whose median scales the prior; the very first ones may be slow."""

_Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Mean:
    """Means of the steps of one batch size and plan.

    `log_seconds`: logarithm of the seconds at the usual speed of the machine. `count`: number of
    recent steps, faded. `steps`: number of all steps, not faded.
    """

    count: float
    steps: float
    running: float
    drafts: float | None
    log_seconds: float

    def add(self, running: float, drafts: float | None, log_seconds: float, steps: int) -> None:
        """Include `steps` more steps."""
        self.steps += steps
        self.count = min(self.count + steps, _MOST_STEPS)
        gain = min(steps / self.count, 1.0)
        self.running += gain * (running - self.running)
        self.log_seconds += gain * (log_seconds - self.log_seconds)
        if drafts is not None and self.drafts is not None:
            self.drafts += gain * (drafts - self.drafts)


class StepCosts:
    """Learns from measured steps and predicts seconds."""

    def __init__(self) -> None:
        size = len(_features(1, OFF))
        # Normal equations of steps without drafts and of steps with drafts. Each kind fades with
        # its own steps, because one kind can be absent for thousands of steps.
        self._left, self._right = np.zeros((2, size, size)), np.zeros((2, size))
        self._scales: list[float] = []
        self._weights, self._covariance = [0.0] * size, np.zeros((size, size))
        # Number of `record` calls, and of those since the last fit.
        self._records = self._unfitted = 0
        self._log_speed = 0.0
        self._means: dict[int, dict[DraftPlan, _Mean]] = defaultdict(dict)

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._scales)

    def seconds(
        self, running: float, plan: DraftPlan, bucket: int, drafts: float | None = None
    ) -> float:
        """Predicted seconds of a step of `running` requests. `bucket`: the group of batch sizes to
        which they belong. `drafts`: mean draft tokens to verify per request; by default all of the
        plan."""
        seconds = exp(self._log_speed) * self._linear(running, plan, drafts)
        mean = self._means[bucket].get(plan)
        if mean is not None:
            error = mean.log_seconds - log(self._linear(mean.running, plan, mean.drafts))
            seconds *= exp(error * mean.steps / (mean.steps + _FIT_STEPS))
        return seconds

    def token_at_least(self, running: float, plan: DraftPlan, drafts: float | None = None) -> float:
        """Lower bound of the seconds of one more token in the policy's forward pass: three standard
        errors below the fit. It stays near 0 until plans with different numbers of tokens and equal
        drafting have run."""
        self._linear(running, plan, drafts)
        slope = np.zeros(len(self._weights))
        slope[1] = 1.0
        slope[2 : 2 + len(_KNEES)] = [_tokens(running, plan, drafts) > knee for knee in _KNEES]
        error = _NOISE * sqrt(float(slope @ self._covariance @ slope))
        return exp(self._log_speed) * max(float(slope @ self._weights) - 3 * error, 0.0)

    def record(
        self,
        bucket: int,
        plan: DraftPlan,
        steps: Sequence[tuple[float, float]],
        drafts: float | None = None,
    ) -> None:
        """Learn from consecutive steps of one plan and `bucket`, as (running requests, seconds).
        `drafts` as for `seconds`."""
        for running, seconds in steps[: _FIRST - len(self._scales)]:
            self._scales.append(seconds / _guess(running, plan))
        count, mean = len(steps), self._means[bucket].get(plan)
        running = sum(size for size, _ in steps) / count
        expected = self.seconds(running, plan, bucket, drafts)
        # The mean limits the effect of single steps that another program disturbed.
        middle = median(seconds for _, seconds in steps)
        least, most = middle / _DISTURBED, middle * _DISTURBED
        ratio = fmean(min(max(seconds, least), most) for _, seconds in steps) / expected
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        features = np.array(_features(running, plan, drafts))
        features /= ratio * expected / exp(self._log_speed)
        kind, kept = int(plan != OFF), _FIT_FADE**count
        self._left[kind] = kept * self._left[kind] + count * np.outer(features, features)
        self._right[kind] = kept * self._right[kind] + count * features
        self._records += 1
        self._unfitted += 1
        # The error of a plan with many steps shows the machine's speed; that of a new plan does
        # not.
        known = mean.steps / (mean.steps + _FIT_STEPS) if mean is not None else 0.0
        gain = 1 - (1 - _SPEED_GAIN * known) ** count
        self._log_speed = _SPEED_FADE**count * self._log_speed + gain * log(ratio)
        own, at_once = log(ratio * expected) - self._log_speed, min(count, _AT_ONCE)
        if mean is None:
            self._means[bucket][plan] = _Mean(at_once, at_once, running, drafts, own)
        else:
            mean.add(running, drafts, own, at_once)

    def count(self, plan: DraftPlan, bucket: int) -> float:
        """Number of measured steps of a plan in a bucket, faded."""
        mean = self._means[bucket].get(plan)
        return 0.0 if mean is None else mean.count

    def fade(self, bucket: int, steps: int) -> None:
        """Fade the step counts of a bucket after `steps` further steps."""
        for mean in self._means[bucket].values():
            mean.count *= _COUNT_FADE**steps

    def _linear(self, running: float, plan: DraftPlan, drafts: float | None) -> float:
        """The fit's prediction in seconds, at the usual speed of the machine."""
        # Fit rarely: later records change the fit less, and a fit takes a fraction of a
        # millisecond.
        if not self._records or self._unfitted > min(self._records // _REFIT_SHARE, _REFIT):
            self._fit()
        pairs = zip(_features(running, plan, drafts), self._weights, strict=True)
        return max(sum(x * weight for x, weight in pairs), 1e-12)

    def _fit(self) -> None:
        """Solve for weights that minimize squared relative errors of steps and prior."""
        prior = _prior() / (median(self._scales) if self._scales else 1.0)
        left = self._left.sum(0) + _PRIOR_WEIGHT * prior.T @ prior
        last = 1 + len(_KNEES)
        left[last, last] += _FLAT * float(np.square(prior[:, last]).sum())
        right = self._right.sum(0) + _PRIOR_WEIGHT * prior.sum(0)
        self._weights = _non_negative(left, right).tolist()
        self._covariance = np.linalg.inv(left)
        self._unfitted = 0


def _non_negative(left: _Floats, right: _Floats) -> _Floats:
    """Solve left x = right with x >= 0: fix the most negative entry at 0 and repeat. A negative
    weight, caused by noise, would give wrong predictions far from the measured plans."""
    free, x = np.ones(len(right), dtype=bool), np.zeros(len(right))
    while free.any():
        x[:] = 0.0
        x[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (x >= 0).all():
            break
        free[int(x.argmin())] = False
    return np.maximum(x, 0.0)


def _features(running: float, plan: DraftPlan, drafts: float | None = None) -> tuple[float, ...]:
    """The factors of the weights a, b, c, c', d, e and f in the linear function."""
    tokens = _tokens(running, plan, drafts)
    beyond = (max(tokens - knee, 0) for knee in _KNEES)
    return 1.0, tokens, *beyond, float(plan != OFF), plan.steps, running * plan.draft_rows


def _tokens(running: float, plan: DraftPlan, drafts: float | None) -> float:
    """Tokens per forward pass of the policy."""
    return running * (plan.verify_tokens if drafts is None else 1 + drafts)


@cache
def _prior() -> _Floats:
    """Features of typical steps divided by their prior seconds, one row per step."""
    steps = [(size, plan) for size in _PRIOR_SIZES for plan in _PRIOR_PLANS]
    return np.array([_features(*step) for step in steps]) / [[_guess(*step)] for step in steps]


def _guess(size: float, plan: DraftPlan) -> float:
    """Prior seconds, relative to a plain step of an empty batch."""
    token = 0.01 + 0.01 * size
    more = 0.03 * plan.steps + token * (plan.verify_tokens - 1 + plan.draft_rows)
    return (1 + 0.05 * size) * (1 + (0.15 + more if plan != OFF else 0.0))
