"""Chooses a draft plan for each decode step from measured times and acceptance.

The engine asks a selector for a plan before each decode step. After the step it reports seconds and
accepted drafts. Selectors do not see tensors or requests, so the trace of a run
(`speculative.trace=true`) can be replayed with another selector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    the length of the chain of first children from the root, and the number of its accepted drafts.
    A chain plan would have had this result. It is empty if it was not measured.
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


class StrategySelector(Protocol):
    """Chooses a plan for each decode step."""

    def begin_rollout(self, requests: int) -> int:
        """`requests` requests arrive at an idle engine. Returns the number of steps to decode
        without drafts; they end early if the engine is idle again. In these steps the drafter gets
        no features, and the engine calls neither `select` nor `record`."""
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

_PROBE, _SHORT_PROBE = 4, 2
"""Steps of a probe with drafts, and of one for which the budget is small. The first one may include
draft catch-up."""

_CONFIRM, _CONFIRM_FROM = 8, 100
"""A switch to a probed plan is delayed by 8 steps of the current plan, once a batch size has had
100 steps. They show if the machine's speed, not the plan, changed during the probe."""

_LEAST_STEPS, _MOST_STEPS = 16, 64
"""Limits of the number of steps between two searches for the best plan, at the same batch size."""

_INTERVAL, _INTERVAL_SHARE = 0.1, 0.05
"""The time between two searches is the smaller of 0.1 seconds and 5 % of the time spent at the
batch size, within the limits in steps. A search takes about half a millisecond."""

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
"""Time that probes of a batch size may lose against its current plan in addition to the share
`exploration`, in plain steps: 1, plus 0.1 per square root of the number of its steps."""

_CREDIT = 2.0
"""Time that drafts may lose against plain decoding in addition to the share `exploration`, once, in
plain steps."""

_REINVESTED = 0.25
"""Share of the time that drafts save which probes may lose."""

_MOST_SAVED, _MOST_OWED = 64.0, 4.0
"""Limits of the budget, in plain steps of the largest batch so far: the most that may be lost at
once, and the most that earlier losses count."""

_OPTIMISM = 0.5
"""To rank probes, the predicted rate of a plan is raised by 50 % over the square root of its number
of steps."""

_ENOUGH, _ENOUGH_PLAIN = 24.0, 12.0
"""A plan with this many steps is not probed again."""

_ELSEWHERE = 4.0
"""Steps of a plan at other batch sizes count like this many steps at most."""

_CATCH_UP = 0.5
"""Assumed seconds of the first draft catch-up at a batch size, in plain steps."""

_LEAST_CATCH_UP = 0.05
"""A catch-up counts as at least this number of plain steps. Drafts from history have none, so they
would teach that a head has none."""

_MOST_GROWTH = 3.0
"""Draft catch-up counts up to three times its estimate."""

_WARY = 0.3
"""The seconds of a plan that never ran may be 30 % more than predicted."""

_CHEAP = 0.1
"""Least share of its time that a probe is assumed to lose when probes are ranked."""

_MAX_MIN_ACCEPTANCE = 0.9


@dataclass(slots=True)
class _Bucket:
    """State of batch sizes that are measured together (`bucket_of`)."""

    current: DraftPlan = OFF
    left: int = 0
    """Steps until the next search."""
    steps: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    """Seconds lost by probes, against the plan that was current."""
    ran: dict[DraftPlan, None] = field(default_factory=lambda: {OFF: None})
    """Plans that ran at these batch sizes."""
    min_acceptance: float = 0.0


@dataclass(frozen=True, slots=True)
class _Risk:
    """Seconds that a plan may lose against plain decoding in each step, negative if it gains, and
    once by draft catch-up."""

    step: float
    catch_up: float

    def of(self, steps: int) -> float:
        """Seconds that `steps` steps may lose."""
        # A plan that gains is kept for some time, so the gain pays for the catch-up.
        return max(self.catch_up + (steps if self.step > 0 else _LEAST_STEPS) * self.step, 0.0)


class CostModelSelector:
    """Chooses the plan with the most predicted tokens per second.

        tokens per second = (1 + expected accepted drafts) / predicted seconds

    `StepCosts` predicts seconds by a linear fit. One `AcceptanceCurve` by depth, for all batch
    sizes and plans, predicts accepted drafts; for trees its prediction is multiplied by measured
    ratios (`TreeRatios`). So a plan has a prediction before it ever ran.

    The selector searches for the best plan every 16 to 64 steps of a batch size. A search may start
    a probe: a few steps of a plan with few measurements that could be better than the current one.
    Probes stop when they have lost more than the share `exploration` of the time. A switch needs a
    predicted gain of `hysteresis`. After rollouts in which drafts gained nothing, whole rollouts
    are decoded without drafts (`Backoff`).

    A budget limits what drafts may lose against plain decoding, at all batch sizes together: two
    plain steps, the share `exploration` of the time, and a share of the time that drafts saved. A
    probe needs a budget for its possible loss: a depth at which no draft was accepted yet counts as
    one where none will be. So a new selector decodes large batches plainly, and learns acceptance
    from small ones, where a probe costs little. The current plan, too, runs only as long as the
    budget covers its possible loss. It must have run at the batch size in a probe.

    Time lost against the best plans in hindsight (`slipstream bench selector`), mean of all
    synthetic settings, in the first and second pass through a setting. The parts were switched off
    before there was a budget:

        default                                  2.6 %   0.7 %
        no budget                                1.9 %   0.8 %
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
        # Drafts of chains over those of their plans: history has no draft for some requests.
        self._proposed = TreeRatios()
        self._costs = StepCosts()
        self._backoff = Backoff(bucket_of)
        self._threshold = bs_threshold
        self._hysteresis, self._exploration = hysteresis, exploration
        self._buckets: dict[int, _Bucket] = defaultdict(_Bucket)
        # Steps of each plan at all batch sizes, faded.
        self._tried: dict[DraftPlan, float] = defaultdict(float)
        # The last choice, for which batch sizes, and whether it is a probe.
        self._plan, self._size, self._probing, self._probe_steps = OFF, 0, False, 0
        self._plain_steps = _SETTLE
        # Seconds that drafts may lose now; negative if drafts have lost more.
        self._budget = 0.0
        # The longest predicted plain step of the batch sizes so far, in seconds.
        self._longest_plain = 0.0
        # Extra seconds of steps with draft catch-up, per request, in plain steps.
        self._catch_up = _CATCH_UP
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
            # Losses of the old head say little about the new one.
            self._budget = max(self._budget, 0.0)
        for known in (self.curve, self._accepted, self._verified, self._proposed):
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
            bucket.lost += share * self._probe_steps * self._seconds(running, probed)
        # A plan that never ran at this batch size is probed before it is chosen. One that is not
        # proven to gain runs only as long as it may lose time.
        if not self._steps_until_loss(running, bucket.current):
            bucket.current = OFF
        ran = sorted(bucket.ran, key=rates.__getitem__, reverse=True)
        best = next(plan for plan in ran if self._steps_until_loss(running, plan))
        if rates[best] > (1 + self._hysteresis) * rates[bucket.current]:
            if probed is not None and bucket.steps > _CONFIRM_FROM:
                return bucket.current, _CONFIRM
            bucket.current = best
        # A draft token pays if its acceptance probability exceeds the number of tokens that the
        # batch generates in the time that verifying the draft takes.
        drafts = self._drafts(size, best)
        token = self._costs.token_at_least(running, best, drafts)
        bucket.min_acceptance = min(token * running * rates[best], _MAX_MIN_ACCEPTANCE)
        early = _EARLY + _ROOT * sqrt(bucket.steps)
        plain = self._seconds(running, OFF)
        if bucket.lost <= self._exploration * bucket.seconds + early * plain:
            probe = self._probe(running, rates)
            if probe is not None:
                self._probing, self._probe_steps = True, probe[1]
                return probe
        wait = min(_INTERVAL, _INTERVAL_SHARE * bucket.seconds)
        steps = int(wait / self._seconds(running, bucket.current))
        steps = min(max(steps, _LEAST_STEPS), _MOST_STEPS)
        return bucket.current, min(steps, self._steps_until_loss(running, bucket.current))

    def _allowed(self, running: int) -> float:
        """The seconds that drafts may lose now; negative if they have lost more."""
        return self._budget + _CREDIT * self._seconds(running, OFF)

    def _probe(
        self, running: int, rates: Mapping[DraftPlan, float]
    ) -> tuple[DraftPlan, int] | None:
        """The plan with the highest ratio of optimistic gain to predicted loss of its probe, and
        the steps of the probe; None if no plan could be better than the current one, or if all
        probes could lose too much."""
        size = bucket_of(running)
        current = self._buckets[size].current
        allowed, plain = self._allowed(running), self._seconds(running, OFF)
        found, most = None, 0.0
        for plan, rate in rates.items():
            known = self._costs.count(plan, size)
            if plan != OFF:
                known += min(0.5 * self._tried[plan], _ELSEWHERE)
            if plan == current or known >= (_ENOUGH_PLAIN if plan == OFF else _ENOUGH):
                continue
            ratio = rate / rates[current]
            gain = ratio * (1 + _OPTIMISM / sqrt(1 + known)) - 1
            if gain <= 0:
                continue
            risk = self._risk(running, plan, plain)
            score = gain / max(risk.of(1) / plain, _CHEAP)
            if score <= most:
                continue
            for steps in (_PLAIN_FIRST,) if plan == OFF else (_PROBE, _SHORT_PROBE):
                if risk.of(steps) <= allowed:
                    found, most = (plan, steps), score
                    break
        return found

    def _steps_until_loss(self, running: int, plan: DraftPlan) -> int:
        """Number of steps until `plan` may have lost the time that it may lose; 0 if these are too
        few. Many if it is proven to gain, or well measured: then its predicted rate decides."""
        if self._costs.count(plan, bucket_of(running)) >= _ENOUGH:
            return _MOST_STEPS
        loss = self._risk(running, plan, self._seconds(running, OFF)).of(1)
        if not loss:
            return _MOST_STEPS
        steps = int(self._allowed(running) / loss)
        return steps if steps >= _SHORT_PROBE else 0

    def _risk(self, running: int, plan: DraftPlan, plain: float) -> _Risk:
        """What `plan` may lose against plain decoding, whose steps take `plain` seconds."""
        if plan == OFF:
            return _Risk(0.0, 0.0)
        size = bucket_of(running)
        rates = self.curve.rates(plan.steps, guess=0.0)
        if plan.topk > 1:
            accepted = self._tree_expectation(size, plan, rates)[1]
        else:
            accepted = expected_accepted(rates)
        known = self._costs.count(plan, size) + self._tried[plan]
        seconds = (1 + _WARY / sqrt(1 + known)) * self._seconds(running, plan)
        catch_up = self._catch_up * plain if self._buckets[size].current == OFF else 0.0
        return _Risk(seconds - (1 + accepted) * plain, catch_up)

    def _learn(self) -> None:
        """Learn acceptance and costs from the steps since the last search."""
        groups: dict[tuple[int, DraftPlan], list[tuple[StepRecord, bool]]] = defaultdict(list)
        for step, typical in self._new:
            groups[bucket_of(step.running), step.drawn].append((step, typical))
        self._new = []
        for (size, plan), pairs in groups.items():
            steps = [step for step, _ in pairs]
            requests = sum(step.running for step in steps)
            drafts = None if plan == OFF else _total(step.drafted for step in steps) / requests
            self._learn_acceptance(size, plan, steps)
            self._learn_costs(size, plan, pairs, drafts)

    def _learn_acceptance(self, size: int, plan: DraftPlan, steps: Sequence[StepRecord]) -> None:
        """Update the acceptance curve and the tree ratios with steps of one plan."""
        count = len(steps)
        if plan.topk <= 1:
            if plan == OFF:
                self.curve.forget(_FADE**count)
            else:
                # A draft that is missing counts as a rejected one, because the plan gets no token.
                accepted = [n for step in steps for n in step.accepted]
                self.curve.record([plan.steps] * len(accepted), accepted, count)
                verified = _total(step.drafted for step in steps) / len(accepted)
                self._proposed.record(plan, verified, plan.steps, len(accepted), count)
            for ratios in (self._accepted, self._verified):
                ratios.forget(_FADE**count)
            return
        prefixes = [pair for step in steps for pair in step.straight]
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
        and whether their seconds are typical. `drafts`: mean verified draft tokens per request."""
        bucket, count = self._buckets[size], len(pairs)
        spent = sum(step.seconds for step, _ in pairs)
        bucket.steps += count
        bucket.seconds += spent
        bucket.ran.update((step.plan, None) for step, _ in pairs)
        for other in self._tried:
            self._tried[other] *= _FADE**count
        self._tried[plan] += count
        self._costs.fade(size, count)
        measured = [(step.running, step.seconds) for step, typical in pairs if typical]
        if measured:
            self._costs.record(size, plan, measured, drafts)
        if not self._costs.known:
            return
        running, gained = pairs[0][0].running, 0.0
        plain = self._seconds(running, OFF)
        self._budget += self._exploration * spent
        if plan != OFF:
            tokens = sum(1 + sum(step.accepted) / step.running for step, _ in pairs)
            expected = self._seconds(running, plan)
            # Another program disturbed steps that took much longer than predicted, or kernels were
            # loaded at their first call.
            most = OUTLIER * expected
            most_late = expected + _MOST_GROWTH * self._catch_up * plain
            drafting = sum(
                min(step.seconds, most if typical else most_late) for step, typical in pairs
            )
            gained = tokens * plain - drafting
            self._budget += gained if gained < 0 else _REINVESTED * gained
            caught_up = [
                max(min(step.seconds, most_late) - expected, 0.0)
                for step, _ in pairs
                if not step.steady
            ]
            if caught_up:
                extra = sum(caught_up) / len(caught_up) / plain
                self._catch_up += 0.5 * (max(extra, _LEAST_CATCH_UP) - self._catch_up)
            if self._probing:
                # Draft catch-up counts as a loss of the probe.
                bucket.lost += sum(caught_up)
        self._longest_plain = max(self._longest_plain, plain)
        least, most = -_MOST_OWED * self._longest_plain, _MOST_SAVED * self._longest_plain
        self._budget = min(max(self._budget, least), most)
        self._backoff.record(spent, gained, count)

    def _rates(self, running: int) -> dict[DraftPlan, float]:
        """Predicted tokens per second of one request, by plan."""
        size = bucket_of(running)
        rates = self.curve.rates(max(plan.steps for plan in self.plans))
        found = {}
        drafts: float | None
        for plan in self.plans:
            if plan.topk > 1:
                drafts, accepted = self._tree_expectation(size, plan, rates)
            else:
                drafts = self._drafts(size, plan)
                accepted = expected_accepted(rates[: plan.steps])
            found[plan] = (1 + accepted) / self._costs.seconds(running, plan, size, drafts)
        return found

    def _seconds(self, running: int, plan: DraftPlan) -> float:
        """Predicted seconds of a step."""
        size = bucket_of(running)
        return self._costs.seconds(running, plan, size, self._drafts(size, plan))

    def _drafts(self, size: int, plan: DraftPlan) -> float | None:
        """Expected draft tokens per request that a plan verifies; None for OFF."""
        if plan == OFF:
            return None
        if plan.topk > 1:
            return self._tree_expectation(size, plan)[0]
        return plan.steps * min(self._proposed.ratio(plan), 1.0)

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
