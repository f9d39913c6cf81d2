"""Chooses a draft plan for each decode step from measured times and acceptance.

The engine asks a selector for a plan before each decode step. After the step it reports seconds and
accepted drafts. Selectors do not see tensors or requests, so the trace of a run
(`speculative.trace=true`) can be replayed with another selector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Protocol, runtime_checkable

from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import (
    AcceptanceCurve,
    TreeRatios,
    expected_accepted,
    sum_of_best,
    tree_probabilities,
)
from slipstream.inference.speculation.backoff import Backoff
from slipstream.inference.speculation.costs import OUTLIER, StepCosts
from slipstream.inference.speculation.plan import OFF, DraftPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One decode step: `running` requests under `plan` took `seconds`.

    `drafted` and `accepted` are the numbers of draft tokens of each request. `steady` is false for
    steps with extra work: draft catch-up, or new requests. `straight`, for trees only: per request,
    the length of the chain of first children from the root, and the number of its accepted drafts
    (`DraftTree.straight`). A chain plan would have had this result. It is empty if it was not
    measured.
    """

    running: int
    plan: DraftPlan
    seconds: float
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    steady: bool = True
    straight: Sequence[tuple[int, int]] = ()

    @property
    def drawn(self) -> DraftPlan:
        """The plan to which the step's seconds belong. A chain can be shorter than planned, or
        empty. A tree keeps its plan even if all of its drafts were left out, because the drafter
        ran."""
        if self.plan.topk > 1:
            return self.plan
        return DraftPlan.chain(max(self.drafted)) if self.drafted else OFF


UNTIL_HEAD = 1 << 40
"""A result of `begin_rollout`: decode without drafts until the drafter is updated."""


class StrategySelector(Protocol):
    """Chooses a plan for each decode step."""

    def begin_rollout(self, requests: int) -> int:
        """`requests` requests arrive at an idle engine. Returns the number of steps to decode
        without drafts (`UNTIL_HEAD`: until the drafter is updated). They end early if the engine is
        idle again. In these steps the drafter gets no features, and the engine calls neither
        `select` nor `record`."""
        ...

    def select(self, running: int) -> DraftPlan:
        """The plan for a step of `running` requests."""
        ...

    def record(self, step: StepRecord) -> None:
        """Learn from a step."""
        ...

    def changed(self, *, drafter: bool = False) -> None:
        """The policy, or the drafter, has new weights: earlier acceptance counts less."""
        ...


@runtime_checkable
class HasMinAcceptance(Protocol):
    """A selector that knows the cost of verifying one more token."""

    def min_acceptance(self, running: int) -> float:
        """The min acceptance probability in a step of `running` requests: drafts of a tree below
        it cost more time than they save."""
        ...


@runtime_checkable
class ListsChoices(Protocol):
    """A selector that can list its choices."""

    def choices(self, running: int) -> Sequence[DraftPlan] | None:
        """All plans that `select` may return at this batch size; None if unknown."""
        ...


@dataclass(slots=True)
class PredefinedSelector:
    """One plan up to a number of running requests, plain decoding beyond: FastRL's thresholds."""

    plan: DraftPlan
    bs_threshold: int | None = None

    def begin_rollout(self, requests: int) -> int:
        """Always drafts from the first step."""
        return 0

    def select(self, running: int) -> DraftPlan:
        """The plan, or OFF beyond the threshold."""
        over = self.bs_threshold is not None and running > self.bs_threshold
        return OFF if over else self.plan

    def choices(self, running: int) -> Sequence[DraftPlan]:
        """The only choice."""
        return (self.select(running),)

    def record(self, step: StepRecord) -> None:
        """Learns nothing."""

    def changed(self, *, drafter: bool = False) -> None:
        """Learns nothing."""


_PLAIN_FIRST = 8
"""First steps of each batch size, without drafts, because all plans are compared with plain
decoding. A probe of plain decoding has the same length."""

_PROBE, _PROBE_LARGE = 4, 2
"""Steps of a probe with drafts, and of one at large batch sizes, where a step shows the acceptance
of more drafts. The first step may include draft catch-up."""

_SMALL = 4
"""The largest batch size that counts as small. Drafts gain most in small batches. All larger batch
sizes share one budget for probes, so that the first rollouts of a large batch lose little."""

_CONFIRM, _CONFIRM_FROM = 8, 100
"""A switch to a probed plan is delayed by 8 steps of the current plan, once a batch size has had
100 steps. They show if the machine's speed, not the plan, changed during the probe."""

_LEAST_STEPS, _MOST_STEPS = 16, 64
"""Limits of the number of steps between two searches for the best plan, at the same batch size.
`_LEAST_LARGE_STEPS` is an exception."""

_INTERVAL, _INTERVAL_SHARE = 0.1, 0.05
"""The time between two searches is the smaller of 0.1 seconds and 5 % of the time spent at the
batch size, within the limits in steps. A search takes about half a millisecond."""

_LEAST_LARGE_STEPS = 2
"""A large batch with drafts has another lower limit: the number of steps in 0.1 seconds, from 2 to
16. A few such steps show the acceptance of many drafts, and a wrong plan loses much time."""

_SETTLE = 3
"""Plain steps after a step with drafts that are not measured, because drafting has evicted weights
from the CPU caches."""

_FADE = 0.998
"""Factor on the weight of earlier acceptance, for each step without drafts, because the policy may
change. For trees, each step without a tree counts."""

_MARGIN = 0.03
"""Plain decoding is chosen if drafts are predicted to gain less, because drafting also costs time
outside decode steps."""

_EARLY, _ROOT = 1.0, 0.1
"""Time that probes may lose in addition to the share `exploration`, in plain steps: 1 at each small
batch size, plus 0.1 per square root of the number of steps."""

_OPTIMISM = 0.5
"""To rank probes, the predicted rate of a plan is raised by 50 % over the square root of its number
of steps."""

_ENOUGH, _ENOUGH_PLAIN = 24.0, 12.0
"""A plan with this many steps is not probed again."""

_ELSEWHERE = 4.0
"""Steps of a plan at other batch sizes count like this many steps at most."""

_CHEAP = 0.1
"""Least share of its time that a probe is assumed to lose when probes are ranked."""

_MAX_MIN_ACCEPTANCE = 0.9


@dataclass(slots=True)
class _Budget:
    """Time that probes may lose, and have lost."""

    early: float
    """Time that probes may lose at first, in plain steps."""
    steps: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    """Seconds lost by probes."""

    def allows_probe(self, exploration: float, plain: float) -> bool:
        """Whether probes may lose more time. `plain`: seconds of a plain step."""
        early = (self.early + _ROOT * sqrt(self.steps)) * plain
        return self.lost <= exploration * self.seconds + early


@dataclass(slots=True)
class _Bucket:
    """State of batch sizes that are measured together (`bucket_of`)."""

    budget: _Budget

    current: DraftPlan = OFF
    left: int = 0
    """Steps until the next search."""
    steps: int = 0
    seconds: float = 0.0
    min_acceptance: float = 0.0


class _Buckets(dict[int, _Bucket]):
    """States by batch size (`bucket_of`), made at first use."""

    def __init__(self) -> None:
        super().__init__()
        self._large = _Budget(early=0.0)

    def __missing__(self, size: int) -> _Bucket:
        budget = _Budget(early=_EARLY) if size <= _SMALL else self._large
        return self.setdefault(size, _Bucket(budget))


class CostModelSelector:
    """Chooses the plan with the most predicted tokens per second.

        tokens per second = (1 + expected accepted drafts) / predicted seconds

    `StepCosts` predicts seconds by a linear fit. One `AcceptanceCurve` by depth, for all batch
    sizes and plans, predicts accepted drafts; for trees its prediction is multiplied by measured
    ratios (`TreeRatios`). So a plan has a prediction before it ever ran.

    The selector searches for the best plan every 16 to 64 steps of a batch size. With drafts for
    more than 4 requests, it searches after 0.1 seconds if that is sooner. A search may start
    a probe: a few steps of a plan with few measurements that could be better than the current one.
    Probes stop when they have lost more than the share `exploration` of the time, at each small
    batch size, or at all larger ones together. A switch needs a predicted gain of `hysteresis`.
    After rollouts in which drafts gained nothing, whole rollouts are decoded without drafts
    (`Backoff`).

    Time lost against the best plans in hindsight (`slipstream bench selector`), mean of all
    synthetic settings, in the first and second pass through a setting. The rows after the first
    were measured when each large batch size had a budget of its own (1.9 %, 0.7 %):

        default                                  1.7 %   0.8 %
        no means per plan, the linear fit alone  2.9 %   1.9 %
        no lower bound for a token's cost        3.1 %   1.6 %
        one acceptance rate for all depths       2.2 %   0.9 %
        random probes                            3.8 %   1.3 %
        no probes                                8.8 %   7.6 %

    The speed factor of `StepCosts` and the delay `_CONFIRM` matter only if the machine's speed
    drifts: in such settings they save up to 1.7 % and 0.7 %. A fit at each record and a search at
    each change of the batch size would cost 3 % with steps of half a millisecond. Backoff saves
    work outside of steps, which the simulator does not count. Tree ratios matter if real trees
    differ from the predicted ones.
    """

    def __init__(
        self,
        plans: Sequence[DraftPlan],
        *,
        bs_threshold: int | None = None,
        hysteresis: float = 0.02,
        exploration: float = 0.005,
    ) -> None:
        """OFF is always one of the plans. Beyond `bs_threshold` running requests nothing is
        drafted. Raises ConfigError without any draft plan."""
        self.plans = (OFF, *(plan for plan in plans if plan != OFF))
        if len(self.plans) == 1:
            raise ConfigError("a selector needs at least one draft plan")
        self.curve = AcceptanceCurve()
        self._accepted, self._verified = TreeRatios(), TreeRatios()
        self._costs = StepCosts()
        self._backoff = Backoff(bucket_of)
        self._threshold = bs_threshold
        self._hysteresis, self._exploration = hysteresis, exploration
        self._buckets = _Buckets()
        # Steps of each plan at all batch sizes, faded.
        self._tried: dict[DraftPlan, float] = defaultdict(float)
        # The last choice, for which batch sizes, and whether it is a probe.
        self._plan, self._size, self._probing = OFF, 0, False
        self._plain_steps = _SETTLE
        # Steps since the last search, and whether their seconds are typical of their plan.
        self._new: list[tuple[StepRecord, bool]] = []

    def begin_rollout(self, requests: int) -> int:
        """Returns steps without drafts after rollouts without gain (`Backoff`), else 0."""
        self._learn()
        return self._backoff.begin_rollout(requests)

    def select(self, running: int) -> DraftPlan:
        """The last choice until the next search is due; then the result of the search."""
        size = bucket_of(running)
        bucket = self._buckets[size]
        over = self._threshold is not None and running > self._threshold
        if self._probing and (over or size != self._size):
            # The probe ends early.
            self._probing, self._buckets[self._size].left = False, 0
        self._size = size
        if over:
            self._plan = OFF
        elif bucket.left:
            bucket.left -= 1
            self._plan = self._plan if self._probing else bucket.current
        else:
            self._learn()
            probed, self._probing = self._plan if self._probing else None, False
            self._plan, steps = self._search(running, probed)
            bucket.left = steps - 1
        return self._plan

    def choices(self, running: int) -> Sequence[DraftPlan]:
        """All plans, or OFF alone beyond the threshold."""
        over = self._threshold is not None and running > self._threshold
        return (OFF,) if over else self.plans

    def min_acceptance(self, running: int) -> float:
        """The threshold that the last search at this batch size computed."""
        return self._buckets[bucket_of(running)].min_acceptance

    def record(self, step: StepRecord) -> None:
        """Stores the step until the next search."""
        plain = step.drawn == OFF
        typical = step.steady and not (plain and self._plain_steps < _SETTLE)
        self._plain_steps = self._plain_steps + 1 if plain else 0
        self._new.append((step, typical))
        if len(self._new) > 4 * _MOST_STEPS:
            self._learn()

    def changed(self, *, drafter: bool = False) -> None:
        """Halves the weight of earlier acceptance."""
        self._learn()
        if drafter:
            self._backoff.drafter_changed()
        for known in (self.curve, self._accepted, self._verified):
            known.forget(0.5)

    def best_speedup(self) -> float | None:
        """Predicted tokens per second of the best plan over plain decoding, at the batch size with
        the largest ratio; None before anything was measured."""
        if not self._costs.known:
            return None
        rates = [self._rates(size) for size in self._buckets]
        return max((max(found.values()) / found[OFF] for found in rates), default=None)

    def _search(self, running: int, probed: DraftPlan | None) -> tuple[DraftPlan, int]:
        """The plan to use next, and for how many steps. `probed` is the plan of a probe that has
        just ended at this batch size."""
        size = bucket_of(running)
        bucket = self._buckets[size]
        if bucket.steps < _PLAIN_FIRST:
            return OFF, _PLAIN_FIRST - bucket.steps
        if not self._costs.known:
            return OFF, 1
        rates = self._rates(running)
        rates[OFF] *= 1 + _MARGIN
        if probed is not None:
            share = max(0.0, 1 - rates[probed] / rates[bucket.current])
            bucket.budget.lost += (
                share * _steps_of_probe(probed, size) * self._seconds(running, probed)
            )
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1 + self._hysteresis) * rates[bucket.current]:
            if probed is not None and bucket.steps > _CONFIRM_FROM:
                return bucket.current, _CONFIRM
            bucket.current = best
        # A draft token pays if its acceptance probability exceeds the number of tokens that the
        # batch generates in the time that verifying the draft takes.
        drafts = self._tree_expectation(size, best)[0] if best.topk > 1 else None
        token = self._costs.token_at_least(running, best, drafts)
        bucket.min_acceptance = min(token * running * rates[best], _MAX_MIN_ACCEPTANCE)
        affordable = bucket.budget.allows_probe(self._exploration, self._seconds(running, OFF))
        probe = self._probe(size, rates) if affordable else None
        if probe is not None:
            self._probing = True
            return probe, _steps_of_probe(probe, size)
        seconds = self._seconds(running, bucket.current)
        wait = min(_INTERVAL, _INTERVAL_SHARE * bucket.seconds)
        least = _LEAST_STEPS
        if size > _SMALL and bucket.current != OFF:
            least = min(max(int(_INTERVAL / seconds), _LEAST_LARGE_STEPS), least)
        return bucket.current, min(max(int(wait / seconds), least), _MOST_STEPS)

    def _probe(self, size: int, rates: Mapping[DraftPlan, float]) -> DraftPlan | None:
        """The plan with the highest ratio of optimistic gain to predicted loss of its probe; None
        if no plan could be better than the current one."""
        current = self._buckets[size].current
        found, most = None, 0.0
        for plan, rate in rates.items():
            known = self._costs.count(plan, size)
            if plan != OFF:
                known += min(0.5 * self._tried[plan], _ELSEWHERE)
            if plan == current or known >= (_ENOUGH_PLAIN if plan == OFF else _ENOUGH):
                continue
            ratio = rate / rates[current]
            gain = ratio * (1 + _OPTIMISM / sqrt(1 + known)) - 1
            score = gain / max(1 - ratio, _CHEAP)
            if score > most:
                found, most = plan, score
        return found

    def _learn(self) -> None:
        """Learn acceptance and costs from the steps since the last search."""
        groups: dict[tuple[int, DraftPlan], list[tuple[StepRecord, bool]]] = defaultdict(list)
        for step, typical in self._new:
            groups[bucket_of(step.running), step.drawn].append((step, typical))
        self._new = []
        for (size, plan), pairs in groups.items():
            steps = [step for step, _ in pairs]
            requests = sum(step.running for step in steps)
            drafts = _total(step.drafted for step in steps) / requests if plan.topk > 1 else None
            self._learn_acceptance(size, plan, steps)
            self._learn_costs(size, plan, pairs, drafts)

    def _learn_acceptance(self, size: int, plan: DraftPlan, steps: Sequence[StepRecord]) -> None:
        """Update the acceptance curve and the tree ratios with steps of one plan."""
        count = len(steps)
        if plan.topk <= 1:
            if plan == OFF:
                self.curve.forget(_FADE**count)
            else:
                drafted = [n for step in steps for n in step.drafted]
                accepted = [n for step in steps for n in step.accepted]
                self.curve.record(drafted, accepted, count)
            for ratios in (self._accepted, self._verified):
                ratios.forget(_FADE**count)
            return
        # Requests for which nothing was drafted show nothing.
        prefixes = [pair for step in steps for pair in step.straight if pair[0]]
        if prefixes:
            drafted, accepted = map(list, zip(*prefixes, strict=True))
            self.curve.record(drafted, accepted, count)
        requests = sum(step.running for step in steps)
        verified = _total(step.drafted for step in steps) / requests
        mean_accepted = _total(step.accepted for step in steps) / requests
        nodes = tree_probabilities(self.curve.rates(plan.steps), plan)
        kept = sum(p >= self._buckets[size].min_acceptance for p in nodes)
        self._verified.record(plan, verified, kept, requests, count)
        self._accepted.record(plan, mean_accepted, sum_of_best(nodes, verified), requests, count)

    def _learn_costs(
        self,
        size: int,
        plan: DraftPlan,
        pairs: Sequence[tuple[StepRecord, bool]],
        drafts: float | None,
    ) -> None:
        """Update costs, time lost by probes and the backoff with steps of one plan. `pairs`: steps,
        and whether their seconds are typical. `drafts`: mean verified draft tokens of a tree."""
        bucket, count = self._buckets[size], len(pairs)
        spent = sum(step.seconds for step, _ in pairs)
        bucket.steps += count
        bucket.seconds += spent
        bucket.budget.steps += count
        bucket.budget.seconds += spent
        for other in self._tried:
            self._tried[other] *= _FADE**count
        self._tried[plan] += count
        self._costs.fade(size, count)
        measured = [(step.running, step.seconds) for step, typical in pairs if typical]
        if measured:
            self._costs.record(size, plan, measured, drafts)
        if not self._costs.known:
            return
        gained = 0.0
        if plan != OFF:
            tokens = sum(1 + sum(step.accepted) / step.running for step, _ in pairs)
            expected = self._seconds(pairs[0][0].running, plan)
            # Another program disturbed steps that took much longer than predicted.
            drafting = sum(
                min(step.seconds, OUTLIER * expected) if typical else step.seconds
                for step, typical in pairs
            )
            gained = tokens * self._seconds(pairs[0][0].running, OFF) - drafting
            if self._probing:
                # Draft catch-up counts as a loss of the probe.
                caught_up = [step for step, _ in pairs if not step.steady]
                bucket.budget.lost += sum(max(step.seconds - expected, 0.0) for step in caught_up)
        self._backoff.record(spent, gained, count)

    def _rates(self, running: int) -> dict[DraftPlan, float]:
        """Predicted tokens per second of one request, by plan."""
        size = bucket_of(running)
        rates = self.curve.rates(max(plan.steps for plan in self.plans))
        found = {}
        for plan in self.plans:
            drafts = None
            if plan.topk > 1:
                drafts, accepted = self._tree_expectation(size, plan, rates)
            else:
                accepted = expected_accepted(rates[: plan.steps])
            found[plan] = (1 + accepted) / self._costs.seconds(running, plan, size, drafts)
        return found

    def _seconds(self, running: int, plan: DraftPlan) -> float:
        """Predicted seconds of a step."""
        size = bucket_of(running)
        drafts = self._tree_expectation(size, plan)[0] if plan.topk > 1 else None
        return self._costs.seconds(running, plan, size, drafts)

    def _tree_expectation(
        self, size: int, plan: DraftPlan, rates: Sequence[float] = ()
    ) -> tuple[float, float]:
        """Expected draft tokens per request that a tree plan verifies, and expected accepted ones.
        `rates`: acceptance rates by depth, if the caller has computed them already."""
        nodes = tree_probabilities((rates or self.curve.rates(plan.steps))[: plan.steps], plan)
        kept = sum(p >= self._buckets[size].min_acceptance for p in nodes)
        drafts = min(kept * self._verified.ratio(plan), len(nodes))
        return drafts, sum_of_best(nodes, drafts) * self._accepted.ratio(plan)


def _total(counts: Iterable[Sequence[int]]) -> int:
    return sum(map(sum, counts))


def _steps_of_probe(plan: DraftPlan, size: int) -> int:
    if plan == OFF:
        return _PLAIN_FIRST
    return _PROBE if size <= _SMALL else _PROBE_LARGE


@cache
def bucket_of(running: int) -> int:
    """The largest batch size that is measured together with `running`: 1, 2, 3, 4, then two sizes
    per doubling (6, 8, 12 ...)."""
    size = 4
    while running > size:
        if running <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return running if running <= 4 else size
