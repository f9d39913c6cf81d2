"""Which plan to draft by: measured, not configured.

A selector is asked before each decode step and told afterwards what the step took and what was
accepted. It knows neither tensors nor requests, so a recorded run can be replayed through another
one (`trace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One decode step: `running` requests under `plan` took `seconds`.

    `drafted` and `accepted` count tokens per request. `steady` is off for steps that also did what
    other steps need not: catch up with features, or take in new requests.
    """

    running: int
    plan: DraftPlan
    seconds: float
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    steady: bool = True


class StrategySelector(Protocol):
    """Chooses a plan for each decode step."""

    def select(self, running: int) -> DraftPlan:
        """The plan for a step of `running` requests."""
        ...

    def record(self, step: StepRecord) -> None:
        """What came of it."""
        ...

    def changed(self) -> None:
        """Policy or drafter have other weights now: earlier acceptance says less."""
        ...


@dataclass(slots=True)
class PredefinedSelector:
    """One plan up to a number of running requests, plain decoding beyond: FastRL's thresholds."""

    plan: DraftPlan
    bs_threshold: int | None = None

    def select(self, running: int) -> DraftPlan:
        """See `StrategySelector`."""
        over = self.bs_threshold is not None and running > self.bs_threshold
        return OFF if over else self.plan

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""

    def changed(self) -> None:
        """See `StrategySelector`."""


class AcceptanceCurve:
    """How often the draft of each depth is right, given that those before it are.

    Old steps fade: the policy drifts. Depths never tried are taken to be like the deepest one that
    was.
    """

    def __init__(self, *, fade: float = 0.99, guess: float = 0.6, guess_weight: float = 4.0):
        """Counts shrink by `fade` a step; `guess` counts like `guess_weight` trials."""
        self._fade, self._guess, self._weight = fade, guess, guess_weight
        self._right: list[float] = []
        self._tried: list[float] = []

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts and how many of them were accepted, per request."""
        deepest = max(drafted, default=0)
        while len(self._tried) < deepest:
            self._right.append(0.0)
            self._tried.append(0.0)
        self.forget(self._fade)
        for drafts, right in zip(drafted, accepted, strict=True):
            for depth in range(min(drafts, right + 1)):
                self._tried[depth] += 1
                self._right[depth] += depth < right

    def forget(self, keep: float) -> None:
        """Let what was seen count only `keep` times as much."""
        self._right = [keep * x for x in self._right]
        self._tried = [keep * x for x in self._tried]

    def share(self, depth: int, guess: float, weight: float) -> float:
        """Share of right drafts at `depth` (from 0) after right ones, where `guess` counts like
        `weight` trials."""
        if depth >= len(self._tried):
            return guess
        return (self._right[depth] + weight * guess) / (self._tried[depth] + weight)

    def rate(self, depth: int) -> float:
        """`share`, a depth that was tried less often taking after the one before it."""
        guess = self._guess
        for right, tried in zip(self._right[: depth + 1], self._tried, strict=False):
            guess = (right + self._weight * guess) / (tried + self._weight)
        return guess

    def expected(self, drafts: int) -> float:
        """Accepted tokens of a chain of `drafts`, on average."""
        total, reach = 0.0, 1.0
        for depth in range(drafts):
            reach *= self.rate(depth)
            total += reach
        return total


_SAMPLES = 4
"""Steps that a plan is measured for at a time."""

_TRUST = 30.0
"""Trials at one batch size that count as much as what is known of all."""

_FIRST_LOOK = 25
"""Steps after which a plan that nearly pays is measured a second time; then four times as many."""


@dataclass(slots=True)
class _Cell:
    """Seconds of a step of one plan, in units of its bucket's scale."""

    samples: list[float] = field(default_factory=list)
    base: float = 0.0
    seen_at: int = 0
    looks: int = 0

    @property
    def known(self) -> bool:
        return self.base > 0


@dataclass(slots=True)
class _Bucket:
    """Batches of about one size. `scale` follows what all plans share: contexts grow longer, a
    machine is busy."""

    cells: dict[DraftPlan, _Cell]
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    scale: float = 1.0
    steps: int = 0
    current: DraftPlan = OFF
    measuring: DraftPlan | None = None


class CostModelSelector:
    """Tokens per second of each plan, from measured seconds and the acceptance curve.

    Acceptance is one curve for all plans, so a plan need not be tried to know what it would accept;
    batch sizes differ from it as far as they have been seen to, for what runs last is the long and
    difficult. Seconds are measured per batch size (exactly up to 4, coarser beyond), for the plans
    that may pay. Switches only where the gain is more than `hysteresis`.
    """

    def __init__(
        self,
        plans: Sequence[DraftPlan],
        *,
        bs_threshold: int | None = None,
        hysteresis: float = 0.03,
        refresh_steps: int = 400,
    ) -> None:
        """`plans` are chains; OFF is always one of the choices. Beyond `bs_threshold` running
        requests nothing is drafted. Plans that nearly pay are measured anew after `refresh_steps`
        steps of their batch size. Raises ConfigError for no plan, or for one that is no chain."""
        self.plans = (OFF, *(plan for plan in plans if plan != OFF))
        if len(self.plans) == 1 or any(plan.topk > 1 for plan in self.plans):
            shown = ", ".join(map(str, plans)) or "none"
            raise ConfigError(f"a selector needs at least one draft plan, all chains; got {shown}")
        self.curve = AcceptanceCurve()
        self._threshold = bs_threshold
        self._hysteresis = hysteresis
        self._refresh = refresh_steps
        self._buckets: dict[int, _Bucket] = {}

    def select(self, running: int) -> DraftPlan:
        """See `StrategySelector`."""
        if self._threshold is not None and running > self._threshold:
            return OFF
        size = bucket_of(running)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = _Bucket({plan: _Cell() for plan in self.plans})
            bucket.current = self._nearest_choice(size)
            self._buckets[size] = bucket
        if bucket.measuring is None:
            bucket.measuring = self._worth_measuring(size, bucket)
        if bucket.measuring is not None:
            return bucket.measuring
        rates = {plan: self._rate(size, plan) for plan in self.plans if bucket.cells[plan].known}
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1 + self._hysteresis) * rates.get(bucket.current, 0.0):
            bucket.current = best
        return bucket.current

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""
        if step.drafted:
            self.curve.record(step.drafted, step.accepted)
        bucket = self._buckets.get(bucket_of(step.running))
        if bucket is not None and step.drafted:
            bucket.curve.record(step.drafted, step.accepted)
        if not step.steady or bucket is None or step.plan not in bucket.cells:
            return
        bucket.steps += 1
        cell = bucket.cells[step.plan]
        cell.seen_at = bucket.steps
        if bucket.measuring == step.plan:
            cell.samples.append(step.seconds / bucket.scale)
            if len(cell.samples) == _SAMPLES:
                # What disturbs a step makes it slower, never faster. Few samples mislead all the
                # same: the first measurements count together.
                weight = min(cell.looks, 2)
                cell.base = (weight * cell.base + sorted(cell.samples)[1]) / (weight + 1)
                cell.looks += 1
                cell.samples.clear()
                bucket.measuring = None
        elif cell.known:
            off = min(max(step.seconds / (cell.base * bucket.scale), 0.5), 2.0)
            bucket.scale *= off**0.1
            cell.base *= off**0.02

    def changed(self) -> None:
        """See `StrategySelector`."""
        self.curve.forget(0.5)
        for bucket in self._buckets.values():
            bucket.curve.forget(0.5)

    def best_speedup(self) -> float | None:
        """Tokens per second of the best plan over plain decoding, at the batch size where that is
        largest; None where nothing was measured yet."""
        found = [
            max(self._rate(size, plan) for plan in self.plans if bucket.cells[plan].known)
            / self._rate(size, OFF)
            for size, bucket in self._buckets.items()
            if bucket.cells[OFF].known and bucket.measuring is None
        ]
        return max(found, default=None)

    def table(self) -> list[tuple[int, DraftPlan, float]]:
        """(batch size, plan in use, its tokens per second over plain decoding) where measured."""
        return [
            (size, b.current, self._rate(size, b.current) / self._rate(size, OFF))
            for size, b in sorted(self._buckets.items())
            if b.cells[OFF].known and b.cells[b.current].known
        ]

    def _rate(self, size: int, plan: DraftPlan) -> float:
        """Tokens per second and request."""
        return (1 + self._accepted(size, plan.steps)) / self._seconds(size, plan)

    def _accepted(self, size: int, drafts: int) -> float:
        """Accepted tokens of a chain of `drafts` at a batch size, on average."""
        own, total, reach = self._buckets[size].curve, 0.0, 1.0
        for depth in range(drafts):
            reach *= own.share(depth, self.curve.rate(depth), _TRUST)
            total += reach
        return total

    def _seconds(self, size: int, plan: DraftPlan) -> float:
        bucket = self._buckets[size]
        cell = bucket.cells[plan]
        if cell.known:
            return cell.base * bucket.scale
        return bucket.cells[OFF].base * bucket.scale * self._cost(size, plan)

    def _cost(self, size: int, plan: DraftPlan) -> float:
        """Seconds over those of plain decoding, where they have not been measured: a guess, put
        right by how wrong it was at the most similar plan and batch size where they have."""
        near = [
            (
                abs(log(other / size)) + abs(log(known.steps / plan.steps)),
                (cell.base / bucket.cells[OFF].base - 1) / _guessed_extra(other, known),
            )
            for other, bucket in self._buckets.items()
            for known, cell in bucket.cells.items()
            if known != OFF and cell.known and bucket.cells[OFF].known
        ]
        wrong = max(min(near)[1], 0.0) if near else 1.0
        return 1 + wrong * _guessed_extra(size, plan)

    def _worth_measuring(self, size: int, bucket: _Bucket) -> DraftPlan | None:
        """OFF first, then what may be better than the best known plan by a wide margin of error;
        later, by a narrow one, what is known but was not looked at for long."""
        if not bucket.cells[OFF].known:
            return OFF
        rates = {plan: self._rate(size, plan) for plan in self.plans}
        best = max(rate for plan, rate in rates.items() if bucket.cells[plan].known)
        # While nothing is drafted nothing is learned of acceptance either: look again.
        blind = all(self._stale(bucket, c) for p, c in bucket.cells.items() if p != OFF)
        for plan in sorted(self.plans, key=rates.__getitem__, reverse=True):
            cell = bucket.cells[plan]
            margin = 0.0
            if not cell.known:
                # Where few requests run drafts pay most, and a wrong guess costs least.
                margin = 1.4 if size <= 4 else 1.2
            elif self._stale(bucket, cell):
                # The longer ago, the less what was seen then is believed.
                margin = 2.0 if blind else 1.6 if self._stale(bucket, cell, 4) else 1.15
            if margin * rates[plan] > best:
                return plan
        return None

    def _stale(self, bucket: _Bucket, cell: _Cell, times: int = 1) -> bool:
        patience = min(self._refresh, _FIRST_LOOK << 2 * max(cell.looks - 1, 0))
        return bucket.steps - cell.seen_at > times * patience

    def _nearest_choice(self, size: int) -> DraftPlan:
        near = [(abs(other - size), b.current) for other, b in self._buckets.items()]
        return min(near)[1] if near else OFF


def _guessed_extra(size: int, plan: DraftPlan) -> float:
    """Extra cost of a step that drafts, in steps that do not."""
    return 0.15 + plan.steps * (0.05 + 0.02 * size)


def bucket_of(running: int) -> int:
    """Batch sizes that are measured together: 1, 2, 3, 4, then two to a doubling (6, 8, 12 ...)."""
    size = 4
    while running > size:
        if running <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return running if running <= 4 else size
