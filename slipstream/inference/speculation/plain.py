"""Chooses the draft plan of each decode step by predicted tokens per second.

    tokens per second = (1 + expected accepted drafts) / predicted seconds

Seconds are a linear function of the tokens per forward pass, fitted by least squares, times a
correction for each batch size and plan that was measured. Acceptance is one curve over depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import (
    AcceptanceCurve,
    TreeYields,
    best_of,
    chances_of_tree,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.recess import Recess
from slipstream.inference.speculation.selector import StepRecord, bucket_of

_KNEES = 8, 128
"""Tokens per forward pass beyond which each token may cost more (CPU, GPU)."""

_REPLAN = 16
"""Steps between two searches for the best plan while the batch size stays."""

_PROBE, _PROBE_OFF = 4, 8
"""Steps of a probe with drafts and without."""

_FADE = 0.999
"""Weight of a measurement in the fit, per later measurement."""

_SHRINK = 2.0
_MOST_COUNT = 40.0
_SPEED_GAIN = 0.2
_SETTLED = 3
_FORGET = 0.998
_MARGIN = 0.03
_MAX_MIN_PROBABILITY = 0.9
_OUTLIER = 2.5
_NOISE = 0.08

_Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Cell:
    """What was measured of a plan at a batch size: `count` steps (faded) of `running` requests
    with `drafts` each took exp(`seconds`), on average, at the usual speed of the machine."""

    count: float = 0.0
    seconds: float = 0.0
    running: float = 0.0
    drafts: float | None = None

    def add(self, running: float, drafts: float | None, seconds: float, count: int) -> None:
        self.count += count
        gain = min(1.0, count / min(self.count, _MOST_COUNT))
        if self.count == count:
            gain = 1.0
        self.seconds += gain * (seconds - self.seconds)
        self.running += gain * (running - self.running)
        if drafts is not None:
            before = drafts if self.drafts is None else self.drafts
            self.drafts = before + gain * (drafts - before)


@dataclass(slots=True)
class _Bucket:
    current: DraftPlan = OFF
    steps: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    min_probability: float = 0.0
    cells: dict[DraftPlan, _Cell] = field(default_factory=dict)

    def seen(self, plan: DraftPlan) -> float:
        cell = self.cells.get(plan)
        return cell.count if cell else 0.0


class LinearCosts:
    """Seconds of a step, linear in tokens per forward pass."""

    def __init__(self) -> None:
        size = 3 + len(_KNEES) + 2
        self._left, self._right = np.zeros((2, size, size)), np.zeros((2, size))
        self._scales: list[float] = []
        self._weights, self._covariance = np.zeros(size), np.zeros((size, size))
        self.speed = 0.0
        self._stale = True

    @property
    def known(self) -> bool:
        return bool(self._scales)

    def seconds(
        self, running: float, plan: DraftPlan, cell: _Cell | None, drafts: float | None = None
    ) -> float:
        seconds = self.shape(running, plan, drafts) * exp(self.speed)
        if cell is not None and cell.count:
            trust = cell.count / (cell.count + _SHRINK)
            fitted = self.shape(cell.running, plan, cell.drafts)
            seconds *= exp(trust * (cell.seconds - log(fitted)))
        return seconds

    def shape(self, running: float, plan: DraftPlan, drafts: float | None) -> float:
        if self._stale:
            self._fit()
        return max(float(np.dot(_features(running, plan, drafts), self._weights)), 1e-9)

    def token(self, running: int, plan: DraftPlan, drafts: float | None) -> float:
        """A lower bound of the seconds of one more token in the forward pass (three standard
        errors below the fit)."""
        if self._stale:
            self._fit()
        rows = running * (plan.verify_tokens if drafts is None else 1 + drafts)
        slope = np.zeros(len(self._weights))
        slope[1 : 2 + len(_KNEES)] = [1.0, *(rows > knee for knee in _KNEES)]
        error = _NOISE * sqrt(float(slope @ self._covariance @ slope))
        return exp(self.speed) * max(float(slope @ self._weights) - 3 * error, 0.0)

    def record(
        self,
        running: float,
        plan: DraftPlan,
        seconds: Sequence[float],
        drafts: float | None,
        cell: _Cell,
    ) -> None:
        """Steps of one plan and batch size took `seconds`."""
        for value in seconds[: 8 - len(self._scales)]:
            self._scales.append(value / _guess(running, plan))
            self._stale = True
        expected = self.seconds(running, plan, cell, drafts)
        off = min(max(median(seconds) / expected, 1 / _OUTLIER), _OUTLIER)
        known = cell.count / (cell.count + _SHRINK)
        count = len(seconds)
        target = off * expected / exp(self.speed)
        x = np.array(_features(running, plan, drafts)) / target
        kind, fade = int(plan != OFF), _FADE**count
        self._left[kind] = fade * self._left[kind] + count * np.outer(x, x)
        self._right[kind] = fade * self._right[kind] + count * x
        self._stale = True
        speed = self.speed
        self.speed = 0.995**count * speed + (1 - (1 - _SPEED_GAIN * known) ** count) * log(off)
        middle = speed if not known else 0.5 * (speed + self.speed)
        cell.add(running, drafts, log(off * expected) - middle, count)

    def _fit(self) -> None:
        scale = median(self._scales) if self._scales else 1e-3
        left, right = self._left.sum(0), self._right.sum(0)
        for running in (1, 4, 16, 64):
            for depth in (0, 1, 3, 7):
                plan = DraftPlan.chain(depth)
                x = np.array(_features(running, plan)) / (scale * _guess(running, plan))
                left += 0.05 * np.outer(x, x)
                right += 0.05 * x
                left[3, 3] += 5 * x[3] ** 2
        self._weights = _non_negative(left, right)
        self._covariance = np.linalg.inv(left)
        self._stale = False


def _non_negative(left: _Floats, right: _Floats) -> _Floats:
    """Least squares with the negative weights set to 0, one after another."""
    free = np.ones(len(right), dtype=bool)
    x = np.zeros(len(right))
    while free.any():
        x[:] = 0.0
        x[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (x >= 0).all():
            break
        free[int(x.argmin())] = False
    return x


def _features(running: float, plan: DraftPlan, drafts: float | None = None) -> tuple[float, ...]:
    rows = running * (plan.verify_tokens if drafts is None else 1 + drafts)
    beyond = (max(rows - knee, 0) for knee in _KNEES)
    return 1.0, rows, *beyond, float(plan != OFF), plan.steps, running * plan.draft_rows


def _guess(size: float, plan: DraftPlan) -> float:
    row = 0.01 + 0.01 * size
    more = 0.03 * plan.steps + row * (plan.verify_tokens - 1 + plan.draft_rows)
    return (1 + 0.05 * size) * (1 + (0.15 + more if plan != OFF else 0.0))


class PlainSelector:
    """See the module's docstring."""

    def __init__(
        self,
        plans: Sequence[DraftPlan],
        *,
        bs_threshold: int | None = None,
        hysteresis: float = 0.02,
        exploration: float = 0.005,
    ) -> None:
        self.plans = (OFF, *(plan for plan in plans if plan != OFF))
        if len(self.plans) == 1:
            raise ConfigError("a selector needs at least one draft plan")
        self.curve = AcceptanceCurve()
        self._trees, self._tree_rows = TreeYields(), TreeYields()
        self._costs = LinearCosts()
        self._threshold = bs_threshold
        self._hysteresis, self._exploration = hysteresis, exploration
        self._buckets: dict[int, _Bucket] = {}
        self._seen: dict[DraftPlan, float] = {}
        self._backoff = Recess(bucket_of)
        self._running = 0
        self._plan, self._left, self._probing = OFF, 0, False
        self._plain = _SETTLED
        self._steps: list[StepRecord] = []

    def begins(self, requests: int) -> int:
        return self._backoff.begins(requests)

    def select(self, running: int) -> DraftPlan:
        if self._left and running == self._running:
            self._left -= 1
            return self._plan
        self._learn()
        size, before = bucket_of(running), bucket_of(self._running or 1)
        self._running = running
        if self._threshold is not None and running > self._threshold:
            self._plan, self._left, self._probing = OFF, 0, False
        elif size == before and self._left:
            # Another batch size, measured together with the one before: go on.
            self._left -= 1
        else:
            self._plan, steps = self._chosen(running, self._bucket(size))
            self._left = steps - 1
        return self._plan

    def _chosen(self, running: int, bucket: _Bucket) -> tuple[DraftPlan, int]:
        """The plan, and for how many steps."""
        self._probing = False
        if bucket.steps < _PROBE_OFF:
            return OFF, _PROBE_OFF - bucket.steps
        rates = self._rates(running, bucket)
        rates[OFF] *= 1 + _MARGIN
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1 + self._hysteresis) * rates[bucket.current]:
            bucket.current = best
        drafts = self._tree(bucket, best)[0] if best.topk > 1 else None
        token = self._costs.token(running, best, drafts)
        bucket.min_probability = min(token * running * rates[best], _MAX_MIN_PROBABILITY)
        here = rates[bucket.current]
        allowed = self._exploration * bucket.seconds + (
            2 + 0.15 * sqrt(bucket.steps)
        ) * self._costs.seconds(running, OFF, bucket.cells.get(OFF))
        if bucket.lost <= allowed:
            probe = self._probe(bucket, rates, here)
            if probe is not None:
                self._probing = True
                steps = _PROBE_OFF if probe == OFF else _PROBE
                seconds = self._seconds(running, bucket, probe)
                bucket.lost += steps * seconds * max(0.0, 1 - rates[probe] / here)
                return probe, steps
        return bucket.current, _REPLAN

    def _probe(
        self, bucket: _Bucket, rates: dict[DraftPlan, float], here: float
    ) -> DraftPlan | None:
        found, most = None, 0.0
        for plan, rate in rates.items():
            if plan == bucket.current:
                continue
            known = bucket.seen(plan)
            if plan != OFF:
                known += min(0.5 * self._seen.get(plan, 0.0), 4.0)
            if known >= (12 if plan == OFF else 24):
                continue
            gain = rate * (1 + 0.5 / sqrt(1 + known)) / here - 1
            score = gain / max(1 - rate / here, 0.1)
            if score > most:
                found, most = plan, score
        return found

    def choices(self, running: int) -> Sequence[DraftPlan]:
        over = self._threshold is not None and running > self._threshold
        return (OFF,) if over else self.plans

    def worth(self, running: int) -> float:
        return self._bucket(bucket_of(running)).min_probability

    def record(self, step: StepRecord) -> None:
        self._steps.append(step)

    def _learn(self) -> None:
        """From the steps since the last search: all of one plan and bucket."""
        steps, self._steps = self._steps, []
        groups: dict[tuple[int, DraftPlan], list[StepRecord]] = {}
        for step in steps:
            groups.setdefault((bucket_of(step.running), step.drawn), []).append(step)
        for (size, plan), group in groups.items():
            self._learn_group(size, plan, group)

    def _learn_group(self, size: int, plan: DraftPlan, steps: list[StepRecord]) -> None:
        bucket, count = self._bucket(size), len(steps)
        bucket.steps += count
        requests = sum(step.running for step in steps)
        spent = sum(step.seconds for step in steps)
        bucket.seconds += spent
        for other in self._seen:
            self._seen[other] *= 0.998**count
        self._seen[plan] = self._seen.get(plan, 0.0) + count
        for cell in bucket.cells.values():
            cell.count *= 0.998**count
        drafts = None
        if plan == OFF:
            self.curve.forget(_FORGET**count)
        elif plan.topk > 1:
            drafts = sum(sum(step.drafted) for step in steps) / requests
            straight = [pair for step in steps for pair in step.straight]
            if straight:
                self.curve.record(*zip(*straight, strict=True), count)
            chances = chances_of_tree(self.curve.rates(plan.steps), plan)
            accepted = sum(sum(step.accepted) for step in steps) / requests
            expected = sum(chance >= bucket.min_probability for chance in chances)
            self._tree_rows.record(plan, drafts, expected, requests, count)
            self._trees.record(plan, accepted, best_of(chances, drafts), requests, count)
        else:
            self.curve.record(
                [n for step in steps for n in step.drafted],
                [n for step in steps for n in step.accepted],
                count,
            )
        if plan.topk <= 1:
            self._trees.forget(_FORGET**count)
            self._tree_rows.forget(_FORGET**count)
        measured = []
        for step in steps:
            settled = plan != OFF or self._plain >= _SETTLED
            self._plain = self._plain + 1 if plan == OFF else 0
            if step.steady and settled:
                measured.append(step.seconds)
        running = requests / count
        if measured:
            cell = bucket.cells.setdefault(plan, _Cell())
            self._costs.record(running, plan, measured, drafts, cell)
        if not self._costs.known:
            return
        off = self._costs.seconds(running, OFF, bucket.cells.get(OFF))
        tokens = sum(1 + sum(step.accepted) / step.running for step in steps)
        if plan != OFF:
            expected = self._costs.seconds(running, plan, bucket.cells.get(plan), drafts)
            late = [step.seconds - expected for step in steps if not step.steady]
            if self._probing:
                bucket.lost += max(sum(late), 0.0)
        self._backoff.stepped(spent, tokens * off - spent if plan != OFF else 0.0, count)

    def changed(self, *, drafter: bool = False) -> None:
        if drafter:
            self._backoff.drafter_changed()
        for known in (self.curve, self._trees, self._tree_rows):
            known.forget(0.5)
        self._seen = {plan: 0.5 * count for plan, count in self._seen.items()}
        for bucket in self._buckets.values():
            for cell in bucket.cells.values():
                cell.count *= 0.5

    def best_speedup(self) -> float | None:
        if not self._costs.known or not self._buckets:
            return None
        found = []
        for size, bucket in self._buckets.items():
            rates = self._rates(size, bucket)
            found.append(max(rates.values()) / rates[OFF])
        return max(found)

    def _bucket(self, size: int) -> _Bucket:
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket()
        return bucket

    def _rates(self, running: int, bucket: _Bucket) -> dict[DraftPlan, float]:
        made, reach = [1.0], 1.0
        shares = self.curve.rates(max(plan.steps for plan in self.plans))
        for share in shares:
            reach *= share
            made.append(made[-1] + reach)
        rates = {}
        for plan in self.plans:
            tokens, drafts = made[plan.steps], None
            if plan.topk > 1:
                drafts, accepted = self._tree(bucket, plan, shares)
                tokens = 1 + accepted
            rates[plan] = tokens / self._costs.seconds(
                running, plan, bucket.cells.get(plan), drafts
            )
        return rates

    def _seconds(self, running: int, bucket: _Bucket, plan: DraftPlan) -> float:
        drafts = self._tree(bucket, plan)[0] if plan.topk > 1 else None
        return self._costs.seconds(running, plan, bucket.cells.get(plan), drafts)

    def _tree(
        self, bucket: _Bucket, plan: DraftPlan, shares: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Verified and accepted drafts of a request."""
        rates = self.curve.rates(plan.steps) if shares is None else shares[: plan.steps]
        chances = chances_of_tree(rates, plan)
        worthy = sum(chance >= bucket.min_probability for chance in chances)
        drafts = min(worthy * self._tree_rows.share(plan), len(chances))
        return drafts, best_of(chances, drafts) * self._trees.share(plan)
