"""Which plan to draft by: measured, not configured.

A selector is asked before each decode step and told afterwards what the step took and what was
accepted. It knows neither tensors nor requests, so a recorded run can be replayed through another
one (`trace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, inf, sqrt
from typing import Protocol, runtime_checkable

from slipstream.errors import ConfigError
from slipstream.inference.speculation.acceptance import (
    AcceptanceCurve,
    TreeYields,
    best_of,
    chances_of_tree,
)
from slipstream.inference.speculation.backoff import Recess
from slipstream.inference.speculation.catch_up import Rest
from slipstream.inference.speculation.costs import FARTHEST, StepCosts
from slipstream.inference.speculation.plan import OFF, DraftPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One decode step: `running` requests under `plan` took `seconds`.

    `drafted` and `accepted` count tokens per request. `steady` is off for steps that also did what
    other steps need not: catch up with features, or take in new requests. `straight`: of each tree,
    how many of its drafts follow one another from its root, each the first after the one before,
    and how many of these were accepted: what a chain would have been. Empty where nobody looked.
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
        """What it took its time for: chains may turn out shorter than planned. A tree is one, too,
        where none of its drafts was worth a row: the drafter has made them."""
        if self.plan.topk > 1:
            return self.plan
        return DraftPlan.chain(max(self.drafted)) if self.drafted else OFF


class StrategySelector(Protocol):
    """Chooses a plan for each decode step."""

    def begins(self, requests: int) -> int:
        """So many requests begin, where none was left. In how many steps from now on, while there
        are any, nothing will be drafted, so that nobody need see what they bring: they are neither
        asked about nor recorded."""
        ...

    def select(self, running: int) -> DraftPlan:
        """The plan for a step of `running` requests."""
        ...

    def record(self, step: StepRecord) -> None:
        """What came of it."""
        ...

    def changed(self, *, drafter: bool = False) -> None:
        """The policy, or the drafter, has other weights now: earlier acceptance says less."""
        ...


@runtime_checkable
class RowJudge(Protocol):
    """A selector that knows what a row of verification takes."""

    def worth(self, running: int) -> float:
        """The chance of being right that a draft must have to gain more than its row takes, in a
        step of so many requests."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A selector that can tell what it may choose."""

    def choices(self, running: int) -> Sequence[DraftPlan] | None:
        """All plans that `select` may return at this batch size; None where nobody knows."""
        ...


@dataclass(slots=True)
class PredefinedSelector:
    """One plan up to a number of running requests, plain decoding beyond: FastRL's thresholds."""

    plan: DraftPlan
    bs_threshold: int | None = None

    def begins(self, requests: int) -> int:
        """See `StrategySelector`."""
        return 0

    def select(self, running: int) -> DraftPlan:
        """See `StrategySelector`."""
        over = self.bs_threshold is not None and running > self.bs_threshold
        return OFF if over else self.plan

    def choices(self, running: int) -> Sequence[DraftPlan]:
        """See `Choosing`."""
        return (self.select(running),)

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""

    def changed(self, *, drafter: bool = False) -> None:
        """See `StrategySelector`."""


_ONE = DraftPlan.chain(1)

_MOST_WORTH = 0.9
"""Chance above which no draft is left out, whatever rows seem to take."""

_TRUST = 30.0
"""Trials at one batch size that count as much as what is known of all."""

_LOOK = 4
"""Steps of a look at another plan, of which all but the first one are measured."""

_PAUSE = 8
"""Steps of a look at decoding without drafts, and those that each batch size begins with: all plans
are held against it."""

_SETTLED = 3
"""After drafts it takes so many steps until decoding without them is as fast as in a row: its
memory has left the caches."""

_THOUGHT = 6e-4
"""Seconds that it takes to choose and to learn: Python that other work has driven out of the
caches, and that drives other work out of them. A step that was thought about is not measured,
but where it takes long."""

_LEARNING = 0.25
"""Of a thought: to learn from steps of one kind."""

_LONG = 50.0
"""Thoughts that a step must take to be measured though it was thought about."""

_THINKING = 0.005
"""Share of the time that this may take: of short steps most go by without, for they are many and
alike. What they took counts all the same, together."""

_FIRST_THOUGHTS = 6**-0.5
"""How many more there may be, by the square roots of the steps at a batch size and of the number of
plans: what comes first teaches most, and many plans take long to look at."""

_LONGEST_SLEEP = 31
"""Steps after which it is looked again whether a thought is due."""

_FORGET = 0.998
"""What a step without drafts leaves of what is known about acceptance."""

_STALE = 0.99
"""What a step by a tree leaves of what was seen of chains: its own first drafts tell it anew."""

_DRAFTING = 0.03
"""What drafting costs beyond the seconds of its steps, and where nearly nothing is gained, being
wrong: less than so much more is no reason to draft."""

_ELSEWHERE = 4.0
"""What was seen of a plan at other batch sizes counts as so many steps at most."""

_ENOUGH = 12.0
"""Steps after which a plan is known well."""

_MOST = 24.0
"""Steps up to which another plan is looked at: of two that are nearly as good it takes as many to
tell which is better, and to look at the worse one costs little."""

_FORGOTTEN = 3.0
"""Steps without drafts, which all plans are held against: with fewer, they are looked at first."""

_CHEAP = 0.1
"""Share of its time that a look is held to lose at least."""

_GAP = 50
"""Steps between two looks at one batch size once there have been many; at first two, four, ..."""

_EARLY, _ROOT = 2.0, 0.15
"""Steps that looks at a batch size may lose beyond their share of the time: at once, and with the
square root of those there were. A share alone of a short life allows no second look, should the
first have been unlucky."""

_PATIENCE = 0.998
"""How much of what was seen of a plan counts after each further step of its batch size."""


@dataclass(slots=True)
class _Seen:
    """How often each plan was tried lately."""

    steps: int = 0
    counts: dict[DraftPlan, tuple[float, int]] = field(default_factory=dict)
    """Steps of each plan, faded, and when the last one was."""

    def record(self, plan: DraftPlan) -> None:
        self.steps += 1
        self.counts[plan] = (self.evidence(plan) + 1, self.steps)

    def evidence(self, plan: DraftPlan) -> float:
        count, last = self.counts.get(plan, (0.0, 0))
        return count * _PATIENCE ** (self.steps - last)

    def forget(self, keep: float) -> None:
        self.counts = {plan: (keep * n, last) for plan, (n, last) in self.counts.items()}


@dataclass(slots=True)
class _Bucket:
    """Batches of about one size."""

    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    trees: TreeYields = field(default_factory=TreeYields)
    tree_rows: TreeYields = field(default_factory=TreeYields)
    current: DraftPlan = OFF
    seen: _Seen = field(default_factory=_Seen)
    looks: int = 0
    looked_at: int = 0
    # Not before: what was chosen is tried for some steps.
    decide_at: int = _PAUSE
    thoughts: float = 0.0
    spent: float = 0.0
    # By looks at decoding without drafts, and at plans.
    lost_plain: float = 0.0
    lost: float = 0.0
    # Whether nothing is drafted because it would take too long to catch up.
    rests: bool = False
    # The chance that a draft of a tree must have.
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class _Look:
    """At a plan, from so many steps of a batch size on until so many."""

    plan: DraftPlan
    bucket: _Bucket
    begun: int
    until: int
    tour: bool
    """Whether the drafter had to catch up for it: what a look costs most, so another may follow."""


@dataclass(slots=True)
class _Slept:
    """Steps of one batch size that went by without a thought, until they are learned from."""

    plain: int = 0
    drafting: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Of chains."""
    trees: dict[DraftPlan, list[StepRecord]] = field(default_factory=dict)
    seconds: dict[DraftPlan, list[StepRecord]] = field(default_factory=dict)
    """Of which it is known what they took, by plan."""

    def add(self, step: StepRecord, drawn: DraftPlan, tells: bool) -> None:
        if drawn == OFF:
            self.plain += 1
        elif drawn.topk > 1:
            self.trees.setdefault(drawn, []).append(step)
        else:
            self.drafting += 1
            self.drafted += step.drafted
            self.accepted += step.accepted
        if tells and drawn == step.plan:
            self.seconds.setdefault(drawn, []).append(step)


class CostModelSelector:
    """Tokens per second of each plan, from predicted seconds and the acceptance curve.

    Acceptance is one curve for all chains, so a plan need not be tried to know what it would
    accept; trees accept, and verify, by shares of what it lets expect that are theirs
    (`TreeYields`), and how far a chain would have come is seen in them, too. Batch sizes differ
    from that as far as they have been seen to, for what runs last is the long and difficult.
    Seconds are those of `StepCosts`. A plan that might be better than the current one, the more so
    the less or the longer ago it was seen, is looked at for some steps. What looks lose is bounded
    to a share of the time, and so is what thinking takes. Each batch size begins without drafts, to
    know what is lost or gained by them. Switches only where the gain is beyond `hysteresis`. After
    rollouts whose drafts gained nothing, some are decoded plainly (`recess`).
    """

    def __init__(
        self,
        plans: Sequence[DraftPlan],
        *,
        bs_threshold: int | None = None,
        hysteresis: float = 0.02,
        exploration: float = 0.005,
    ) -> None:
        """OFF is always one of the choices. Beyond `bs_threshold` running
        requests nothing is drafted. `exploration` is the share of the time that looking at other
        plans may lose. Raises ConfigError for no plan."""
        self.plans = (OFF, *(plan for plan in plans if plan != OFF))
        if len(self.plans) == 1:
            raise ConfigError("a selector needs at least one draft plan")
        self.curve = AcceptanceCurve()
        # What trees' first drafts would have been as chains: where none have been tried, what those
        # might be at best, for drafts that are not worth a row are missing.
        self._straight = AcceptanceCurve()
        self._trees, self._tree_rows = TreeYields(), TreeYields()
        self._costs = StepCosts()
        self._threshold = bs_threshold
        self._hysteresis = hysteresis
        self._exploration = exploration
        self._buckets: dict[int, _Bucket] = {}
        self._seen = _Seen()
        self._look: _Look | None = None
        self._spent = 0.0
        self._rest = Rest()
        self._recess = Recess(bucket_of)
        # Whether this step goes by without a thought, by which plan, and how many more will if the
        # batch stays as it is; those that did while it stayed so, and all by batch size.
        self._asleep = False
        self._dreamt, self._sleep = OFF, 0
        self._unseen: list[StepRecord] = []
        self._slept: dict[int, _Slept] = {}
        # When costs were told last.
        self._told = 0.0
        # Steps without drafts in a row.
        self._plain = _SETTLED

    def begins(self, requests: int) -> int:
        """See `StrategySelector`."""
        self._remember()
        self._rest.missed = 0.0
        return self._recess.begins(requests)

    def select(self, running: int) -> DraftPlan:
        """See `StrategySelector`."""
        if self._sleep and running == self._rest.running:
            self._sleep -= 1
            return self._dreamt
        self._remember()
        grown = running > self._rest.running
        self._rest.batch(running, bucket_of(running))
        bucket = self._bucket(running)
        over = self._threshold is not None and running > self._threshold
        plan, steps = self._without_a_thought(bucket, grown, over)
        self._asleep = steps > 0
        if self._asleep:
            self._dreamt, self._sleep = plan, steps - 1
            return plan
        self._learn()
        bucket.thoughts += 1
        return OFF if over or not self._costs.known else self._chosen(running)

    def _without_a_thought(self, bucket: _Bucket, grown: bool, over: bool) -> tuple[DraftPlan, int]:
        """What to do without one, for so many steps; if none are left it is time to think."""
        if bucket.seen.steps < _PAUSE:
            return OFF, _PAUSE - bucket.seen.steps
        look = self._look
        if look is not None and not over:
            left = look.until - bucket.seen.steps
            return look.plan, left if look.bucket is bucket else 0
        # Who was not drafted for until now must be caught up with. New requests bring what there is
        # to know of them.
        begins = bucket.current != OFF or (grown and bucket.rests)
        if bucket.seen.steps == bucket.decide_at or (begins and self._rest.missed > 0 and not over):
            return OFF, 0
        early = _FIRST_THOUGHTS * sqrt(len(self.plans) * bucket.seen.steps)
        thoughts = bucket.thoughts - early
        wait = thoughts * _THOUGHT / _THINKING - bucket.spent
        steps = min(ceil(wait * bucket.seen.steps / bucket.spent), _LONGEST_SLEEP)
        return OFF if over else bucket.current, max(steps, bucket.decide_at - bucket.seen.steps)

    def _chosen(self, running: int) -> DraftPlan:
        bucket = self._bucket(running)
        tour = self._look is not None and self._look.tour
        if self._look is not None:
            self._looked(running, self._look)
            self._look = None
        rates = self._rates(running)
        rates[OFF] *= 1 + _DRAFTING
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1 + self._hysteresis) * rates[bucket.current]:
            bucket.current = best
            if bucket.seen.evidence(best) < _ENOUGH:
                bucket.decide_at = bucket.seen.steps + _LOOK
        here = rates[bucket.current]
        # A row gives its chance of a token, and takes the time of others.
        drafts = self._of_tree(bucket_of(running), best)[0] if best.topk > 1 else None
        row = self._costs.row_at_least(running, best, drafts)
        bucket.worth = min(row * running * rates[best], _MOST_WORTH)
        beginning = self._rest.cost(self._row(running))
        least = self._least_rate(running, rates[OFF], beginning)
        bucket.rests = here < least
        if bucket.rests:
            bucket.current, here = OFF, rates[OFF]
        if tour or bucket.seen.steps > bucket.looked_at + min(2 * bucket.looks, _GAP):
            allowed = self._allowed(running)
            # The first look at a batch size is worth what it costs.
            affordable = {
                plan: rate
                for plan, rate in rates.items()
                if not bucket.looks
                or (bucket.lost_plain if plan == OFF else bucket.lost + beginning) <= allowed
            }
            plan = self._worth_a_look(running, affordable, max(here, least))
            if plan is not None:
                begun = bucket.seen.steps
                until = begun + (_PAUSE if plan == OFF else _LOOK)
                bucket.looks, bucket.looked_at = bucket.looks + 1, until
                begins = plan != OFF and self._rest.missed > 0
                bucket.lost += beginning if begins else 0.0
                self._look = _Look(plan, bucket, begun, until, begins)
                return plan
        return bucket.current

    def choices(self, running: int) -> Sequence[DraftPlan]:
        """See `Choosing`."""
        over = self._threshold is not None and running > self._threshold
        return (OFF,) if over else self.plans

    def worth(self, running: int) -> float:
        """See `RowJudge`."""
        return self._bucket(running).worth

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""
        if self._asleep:
            self._unseen.append(step)
            return
        self._spent += step.seconds
        bucket, size = self._bucket(step.running), bucket_of(step.running)
        bucket.spent += step.seconds
        made, drawn = 1 + sum(step.accepted) / step.running, step.drawn
        self._plain = 0 if drawn != OFF else self._plain + 1
        if drawn == OFF:
            self._forget(bucket, 1)
        elif drawn.topk > 1:
            self._branched(size, drawn, [step])
        else:
            self.curve.record(step.drafted, step.accepted)
            bucket.curve.record(step.drafted, step.accepted)
            self._forget_trees(bucket, 1)
        bucket.seen.record(step.plan)
        self._seen.record(step.plan)
        if self._tells(step) and (step.seconds > _LONG * _THOUGHT or not self._costs.known):
            self._measured(size, drawn, [step])
        elif drawn != OFF and self._rest.missed and self._costs.known:
            verified = _verified([step])
            extra = step.seconds - self._costs.seconds(step.running, drawn, size, verified)
            self._rest.took_in(extra, self._row(step.running))
        self._rest.stepped(made, drafted=drawn != OFF)
        gained = self._gained(step, drawn, made, self._tells(step), {}) if drawn != OFF else 0.0
        self._recess.stepped(step.seconds, gained)

    def changed(self, *, drafter: bool = False) -> None:
        """See `StrategySelector`."""
        if drafter:
            self._recess.drafter_changed()
        self.curve.forget(0.5)
        self._trees.forget(0.5)
        self._straight.forget(0.5)
        self._tree_rows.forget(0.5)
        for bucket in self._buckets.values():
            bucket.curve.forget(0.5)
            bucket.trees.forget(0.5)
            bucket.tree_rows.forget(0.5)
            bucket.seen.forget(0.5)
        self._seen.forget(0.5)

    def best_speedup(self) -> float | None:
        """Tokens per second of the best plan over plain decoding, at the batch size where that is
        largest; None where nothing was measured yet."""
        if not self._costs.known:
            return None
        found = [
            max(self._rate(size, plan) for plan in self.plans) / self._rate(size, OFF)
            for size in self._buckets
        ]
        return max(found, default=None)

    def _remember(self) -> None:
        """Take account of the steps slept through, but for what they teach."""
        self._sleep = 0
        if not self._unseen:
            return
        # All of one batch size and one plan: a sleep ends with either.
        running, plan = self._unseen[0].running, self._unseen[0].plan
        bucket, size = self._bucket(running), bucket_of(running)
        slept = self._slept.setdefault(size, _Slept())
        expected: dict[DraftPlan, float] = {}
        seconds = gained = 0.0
        for step in self._unseen:
            seconds += step.seconds
            drawn, made = step.drawn, 1 + sum(step.accepted) / running
            drafting = drawn != OFF
            self._plain = 0 if drafting else self._plain + 1
            tells = self._tells(step)
            slept.add(step, drawn, tells)
            self._rest.stepped(made, drafting)
            if drafting:
                gained += self._gained(step, drawn, made, tells, expected)
        self._spent += seconds
        bucket.spent += seconds
        self._recess.stepped(seconds, gained, len(self._unseen))
        left = len(self._unseen)
        while left and bucket.seen.evidence(plan) < _MOST:
            bucket.seen.record(plan)
            self._seen.record(plan)
            left -= 1
        bucket.seen.steps += left
        self._unseen.clear()

    def _learn(self) -> None:
        """From the steps slept through."""
        for size, slept in self._slept.items():
            bucket = self._buckets[size]
            self._forget(bucket, slept.plain)
            if slept.drafting:
                self.curve.record(slept.drafted, slept.accepted, slept.drafting)
                bucket.curve.record(slept.drafted, slept.accepted, slept.drafting)
                self._forget_trees(bucket, slept.drafting)
            for plan, steps in slept.trees.items():
                self._branched(size, plan, steps)
            for plan, steps in slept.seconds.items():
                self._measured(size, plan, steps)
                bucket.thoughts += _LEARNING
        self._slept.clear()

    def _gained(
        self,
        step: StepRecord,
        drawn: DraftPlan,
        made: float,
        tells: bool,
        expected: dict[DraftPlan, float],
    ) -> float:
        """Seconds, of a step with drafts, over steps without them that would have made as much.
        `expected` keeps what steps of this batch size are held to take: most are alike."""
        if not self._costs.known:
            return 0.0
        for plan in (OFF, drawn):
            if plan not in expected:
                expected[plan] = self._seconds(step.running, plan)
        # Beyond, something else ran.
        most = FARTHEST * expected[drawn] if tells else inf
        return made * expected[OFF] - min(step.seconds, most)

    def _tells(self, step: StepRecord) -> bool:
        """Whether it took what such steps take in a row."""
        return step.steady and not 0 < self._plain <= _SETTLED

    def _measured(self, size: int, plan: DraftPlan, steps: Sequence[StepRecord]) -> None:
        elapsed, self._told = self._spent - self._told, self._spent
        taken = [(step.running, step.seconds) for step in steps]
        self._costs.record(size, plan, taken, elapsed, _verified(steps))

    def _branched(self, size: int, plan: DraftPlan, steps: Sequence[StepRecord]) -> None:
        """What trees of a batch size have come to."""
        bucket, count = self._buckets[size], sum(step.running for step in steps)
        straight = [pair for step in steps for pair in step.straight]
        if straight:
            drafted, right = zip(*straight, strict=True)
            self._straight.record(drafted, right, len(steps))
        for curve in (self.curve, bucket.curve):
            curve.forget(_STALE ** len(steps))
        drafts, accepted = (
            sum(sum(counts) for counts in found) / count
            for found in ([s.drafted for s in steps], [s.accepted for s in steps])
        )
        for rates, rows, trees in (
            (self._first_rates(plan.steps), self._tree_rows, self._trees),
            (self._shares(size, plan.steps), bucket.tree_rows, bucket.trees),
        ):
            chances = chances_of_tree(rates, plan)
            rows.record(plan, drafts, _worthy(chances, bucket.worth), count, len(steps))
            trees.record(plan, accepted, best_of(chances, drafts), count, len(steps))

    def _forget(self, bucket: _Bucket, steps: int) -> None:
        """Policies drift, unseen while nothing is drafted."""
        for known in (self.curve, bucket.curve, self._straight):
            known.forget(_FORGET**steps)
        self._forget_trees(bucket, steps)

    def _forget_trees(self, bucket: _Bucket, steps: int) -> None:
        """What was seen of trees says less and less while chains are drafted, or nothing."""
        for known in (self._trees, self._tree_rows, bucket.trees, bucket.tree_rows):
            known.forget(_FORGET**steps)

    def _bucket(self, running: int) -> _Bucket:
        size = bucket_of(running)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket()
        return bucket

    def _rate(self, running: int, plan: DraftPlan) -> float:
        """Tokens per second and request."""
        return self._rates(running, [plan])[plan]

    def _rates(
        self, running: int, plans: Sequence[DraftPlan] | None = None
    ) -> dict[DraftPlan, float]:
        """`_rate` of some plans, or of all."""
        plans = self.plans if plans is None else plans
        size = bucket_of(running)
        shares = self._shares(size, max(plan.steps for plan in plans))
        made, reach = [1.0], 1.0
        for share in shares:
            reach *= share
            made.append(made[-1] + reach)
        rates = {}
        for plan in plans:
            tokens, drafts = made[plan.steps], None
            if plan.topk > 1:
                drafts, accepted = self._of_tree(size, plan, shares)
                tokens = 1 + accepted
            rates[plan] = tokens / self._costs.seconds(running, plan, size, drafts)
        return rates

    def _of_tree(
        self, size: int, plan: DraftPlan, shares: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Drafts of a request that are verified and how many of them accepted, on average; `shares`
        as `_shares` has them, where they are at hand."""
        bucket = self._buckets[size]
        known = self._shares(size, plan.steps) if shares is None else shares[: plan.steps]
        chances = chances_of_tree(known, plan)
        drafts = _worthy(chances, bucket.worth) * bucket.tree_rows.share(
            plan, self._tree_rows.share(plan)
        )
        drafts = min(drafts, len(chances))
        accepted = best_of(chances, drafts)
        return drafts, accepted * bucket.trees.share(plan, self._trees.share(plan))

    def _seconds(self, running: int, plan: DraftPlan) -> float:
        """Of a step by a plan."""
        size = bucket_of(running)
        drafts = self._of_tree(size, plan)[0] if plan.topk > 1 else None
        return self._costs.seconds(running, plan, size, drafts)

    def _shares(self, size: int, depths: int) -> list[float]:
        """Of right drafts of chains after right ones, by depth, at a batch size."""
        own = self._buckets[size].curve
        return [
            own.share(depth, guess, _TRUST) for depth, guess in enumerate(self._first_rates(depths))
        ]

    def _first_rates(self, depths: int) -> list[float]:
        """Of right drafts of chains, at all batch sizes."""
        return self.curve.rates(depths, like=self._straight)

    def _looked(self, running: int, look: _Look) -> None:
        """A look has ended."""
        # By what is believed, not by what was measured: what disturbs a step, or how lucky its
        # drafts were, is no loss of the look's.
        bucket = look.bucket
        rates = self._rates(running, [look.plan, bucket.current])
        lost = max(0.0, 1 - rates[look.plan] / rates[bucket.current])
        lost *= self._seconds(running, look.plan)
        lost *= bucket.seen.steps - look.begun
        if look.plan == OFF:
            bucket.lost_plain += lost
        else:
            bucket.lost += lost

    def _row(self, running: int) -> float:
        """Seconds that one more row of each request takes, for each."""
        size, costs = bucket_of(running), self._costs
        more = costs.seconds(running, _ONE, size) - costs.seconds(running, OFF, size)
        return max(more, 0.0) / running

    def _least_rate(self, running: int, plain: float, beginning: float) -> float:
        """What a plan must yield, where without drafts it is `plain`, to gain more while the batch
        lasts than its `beginning` costs."""
        size = bucket_of(running)
        drafting = self._rest.horizon(lambda other: self._bucket(other).current != OFF)
        lasts = self._costs.seconds(running, OFF, size) * drafting
        return plain / (1 - beginning / lasts) if beginning < lasts else inf

    def _allowed(self, running: int) -> float:
        """Seconds that looks at this batch size may have lost by now."""
        bucket = self._bucket(running)
        step = self._costs.seconds(running, OFF, bucket_of(running))
        early = _EARLY + _ROOT * sqrt(bucket.seen.steps)
        return self._exploration * bucket.spent + early * step

    def _worth_a_look(
        self, running: int, rates: dict[DraftPlan, float], least: float
    ) -> DraftPlan | None:
        """A plan other than the current one that, as little as is known of it, might yield more
        than `least`: the most for what a look is believed to lose."""
        bucket = self._bucket(running)
        found, most = None, (False, 0.0)
        for plan, rate in rates.items():
            if plan == bucket.current:
                continue
            known = bucket.seen.evidence(plan)
            if plan != OFF:
                # Other batch sizes show much of what a plan costs and yields. Not what all plans
                # are held against: where everything is drafted, steps without drafts can be
                # anything, as far as a fit to the others goes.
                known += min(0.5 * self._seen.evidence(plan), _ELSEWHERE)
            gain = rate * (1 + 0.5 / (1 + known) ** 0.5) - least
            if gain <= 0 or known >= (_ENOUGH if plan == OFF else _MOST):
                continue
            lost = self._seconds(running, plan) * max(1 - rate / least, _CHEAP)
            mine = plan == OFF and known < _FORGOTTEN, gain / lost
            if mine > most:
                found, most = plan, mine
        return found


def _verified(steps: Sequence[StepRecord]) -> float | None:
    """Drafts of a request in steps of one plan, on average: of trees, for some may have been left
    out. None where the plan says it."""
    if steps[0].drawn.topk <= 1:
        return None
    return sum(sum(step.drafted) for step in steps) / sum(step.running for step in steps)


def _worthy(chances: Sequence[float], worth: float) -> int:
    """How many are worth a row."""
    return sum(chance >= worth for chance in chances)


@cache
def bucket_of(running: int) -> int:
    """Batch sizes that are measured together: 1, 2, 3, 4, then two to a doubling (6, 8, 12 ...)."""
    size = 4
    while running > size:
        if running <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return running if running <= 4 else size
