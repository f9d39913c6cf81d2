"""Predicts the seconds of a decode step from the number of running requests and the draft plan.

A linear function of the tokens T per forward pass of the policy and the tokens S per forward pass
of the drafter is fitted to all steps, so it also covers batch sizes and plans that never ran:

    seconds = a + b T + c max(T - 8, 0) + c' max(T - 128, 0)
            + [drafts] (d + e steps + f S)

All weights are at least 0. They minimize squared relative errors; old steps fade. Each batch size
and plan that was measured also has a mean of its own, and the prediction moves from the fit to that
mean as steps accumulate. One factor for all plans follows the speed of the machine, which other
programs change for seconds at a time. Used by `selector`.
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
"""Tokens per forward pass from which each further token may cost more: reading the weights hides
the cost of the first ones, a few on a CPU and about a hundred on a GPU."""

_FIT_FADE = 0.999
"""Weight in the fit that a step keeps after each later step with drafts, or without them."""

_COUNT_FADE = 0.998
"""Weight that a plan's own mean keeps after each later step of its batch size."""

_MOST_STEPS = 32.0
"""Steps that the mean of a plan remembers, at most. More of them follow the machine too slowly."""

_AT_ONCE = 8
"""Steps of one call of `record` that count, at most: their errors have common causes."""

_FIT_STEPS = 4.0
"""Own steps of a plan that weigh as much as the fit."""

_SPEED_GAIN = 0.05
"""Share of a well-known plan's error that is held to be the machine's speed, per step."""

_SPEED_FADE = 0.995
"""What is left of the speed factor's logarithm after each step."""

OUTLIER = 2.5
"""Errors beyond this factor, either way, count as this factor: another program ran."""

_DISTURBED = 1.5
"""Steps further than this factor from the median of those recorded with them count as this far."""

_NOISE = 0.08
"""Standard deviation of the relative error of one step, for the lower bound of a token's cost."""

_REFIT_SHARE, _REFIT = 8, 16
"""A fit holds for an eighth of the records so far, and for 16 at most."""

_PRIOR_WEIGHT = 0.05
_PRIOR_SIZES, _PRIOR_PLANS = (1, 4, 16, 64), [DraftPlan.chain(depth) for depth in (0, 1, 3, 7)]
_FLAT = 5.0
"""Weight of the prior that tokens beyond the last knee cost nothing extra."""

_FIRST = 8
"""Steps whose median scales the prior. The very first steps may be slow."""

_Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Mean:
    """One batch size and plan: means of the features of its steps and of the logarithm of their
    seconds at the usual speed of the machine. `count`: recent steps, which fade; `steps`: all."""

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
        # Sums of the normal equations, of steps without drafts and of those with drafts. Each kind
        # fades with its own steps, because one kind can be absent for thousands of steps.
        self._left, self._right = np.zeros((2, size, size)), np.zeros((2, size))
        self._scales: list[float] = []
        self._weights, self._covariance = [0.0] * size, np.zeros((size, size))
        # Calls of `record`, and those since the last fit.
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
        """Predicted seconds of a step of `running` requests, which belong to the batch sizes of
        `bucket`. `drafts`: mean draft tokens to verify per request; by default all of the plan."""
        seconds = exp(self._log_speed) * self._linear(running, plan, drafts)
        mean = self._means[bucket].get(plan)
        if mean is not None:
            error = mean.log_seconds - log(self._linear(mean.running, plan, mean.drafts))
            seconds *= exp(error * mean.steps / (mean.steps + _FIT_STEPS))
        return seconds

    def token_at_least(self, running: float, plan: DraftPlan, drafts: float | None = None) -> float:
        """Lower bound of the seconds of one more token in the forward pass: three standard errors
        below the fit. It is 0 until plans have separated the cost of tokens from that of drafts."""
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
        """Learn from (running requests, seconds) of consecutive steps of one plan and `bucket`.
        `drafts` as for `seconds`."""
        for running, seconds in steps[: _FIRST - len(self._scales)]:
            self._scales.append(seconds / _guess(running, plan))
        count, mean = len(steps), self._means[bucket].get(plan)
        running = sum(size for size, _ in steps) / count
        expected = self.seconds(running, plan, bucket, drafts)
        # A mean without single steps that another program disturbed.
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
        # The error of a plan with many steps is the machine's; that of a new plan is its own.
        known = mean.steps / (mean.steps + _FIT_STEPS) if mean is not None else 0.0
        gain = 1 - (1 - _SPEED_GAIN * known) ** count
        self._log_speed = _SPEED_FADE**count * self._log_speed + gain * log(ratio)
        own, at_once = log(ratio * expected) - self._log_speed, min(count, _AT_ONCE)
        if mean is None:
            self._means[bucket][plan] = _Mean(at_once, at_once, running, drafts, own)
        else:
            mean.add(running, drafts, own, at_once)

    def count(self, plan: DraftPlan, bucket: int) -> float:
        """Steps of a plan (faded) that were measured in a bucket."""
        mean = self._means[bucket].get(plan)
        return 0.0 if mean is None else mean.count

    def fade(self, bucket: int, steps: int) -> None:
        """`steps` further steps of a bucket went by."""
        for mean in self._means[bucket].values():
            mean.count *= _COUNT_FADE**steps

    def _linear(self, running: float, plan: DraftPlan, drafts: float | None) -> float:
        # Later records change the fit less, and a fit costs a fraction of a millisecond.
        if not self._records or self._unfitted > min(self._records // _REFIT_SHARE, _REFIT):
            self._fit()
        pairs = zip(_features(running, plan, drafts), self._weights, strict=True)
        return max(sum(x * weight for x, weight in pairs), 1e-12)

    def _fit(self) -> None:
        prior = _prior() / (median(self._scales) if self._scales else 1.0)
        left = self._left.sum(0) + _PRIOR_WEIGHT * prior.T @ prior
        last = 1 + len(_KNEES)
        left[last, last] += _FLAT * float(np.square(prior[:, last]).sum())
        right = self._right.sum(0) + _PRIOR_WEIGHT * prior.sum(0)
        self._weights = _non_negative(left, right).tolist()
        self._covariance = np.linalg.inv(left)
        self._unfitted = 0


def _non_negative(left: _Floats, right: _Floats) -> _Floats:
    """Solve left x = right, fixing the most negative entry at 0 until none is left. A weight that
    noise made negative would give wrong predictions far from the measured plans."""
    free, x = np.ones(len(right), dtype=bool), np.zeros(len(right))
    while free.any():
        x[:] = 0.0
        x[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (x >= 0).all():
            break
        free[int(x.argmin())] = False
    return np.maximum(x, 0.0)


def _features(running: float, plan: DraftPlan, drafts: float | None = None) -> tuple[float, ...]:
    tokens = _tokens(running, plan, drafts)
    beyond = (max(tokens - knee, 0) for knee in _KNEES)
    return 1.0, tokens, *beyond, float(plan != OFF), plan.steps, running * plan.draft_rows


def _tokens(running: float, plan: DraftPlan, drafts: float | None) -> float:
    """Tokens per forward pass of the policy."""
    return running * (plan.verify_tokens if drafts is None else 1 + drafts)


@cache
def _prior() -> _Floats:
    """Features of some steps over their prior seconds: a row for each step."""
    steps = [(size, plan) for size in _PRIOR_SIZES for plan in _PRIOR_PLANS]
    return np.array([_features(*step) for step in steps]) / [[_guess(*step)] for step in steps]


def _guess(size: float, plan: DraftPlan) -> float:
    """Prior seconds, relative to a plain step of an empty batch."""
    token = 0.01 + 0.01 * size
    more = 0.03 * plan.steps + token * (plan.verify_tokens - 1 + plan.draft_rows)
    return (1 + 0.05 * size) * (1 + (0.15 + more if plan != OFF else 0.0))
