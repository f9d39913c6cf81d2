"""Reports on a selector: messages for the user, and a trace of all its decisions.

`ReportedSelector` wraps any selector. It prints one message if drafts gain nothing, and one if
almost no draft of the draft head is accepted. The trace has one JSON line per decode step and per
event between steps. `replay` passes a trace to another selector (`speculative.trace=true`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.inference.speculation.bandits import BanditSelector
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    UNTIL_HEAD,
    CostModelSelector,
    HasMinAcceptance,
    ListsChoices,
    StepRecord,
    StrategySelector,
)

_FAULT_RATE = 0.1
"""A head with fewer accepted drafts per verification is reported, if that is statistically clear.
Few verifications must be enough, because a selector rarely drafts with a bad head."""

_FAULT_STEPS = 4
"""Least steps with drafts before a head is judged: requests of one step are alike."""

_FAULT_WINDOW = 500
"""Verifications after which the counts of a head that is not at fault start again."""

_USELESS_AFTER = 1000
"""Steps between two checks whether any plan is faster than plain decoding."""


_USELESS_ROLLOUTS = 3
"""Number of rollouts in backoff after which a message says that drafts gain nothing."""


class ReportedSelector:
    """A `StrategySelector` that passes all calls on to another one and reports on it."""

    def __init__(
        self,
        selector: StrategySelector,
        *,
        notify: Callable[[str], None],
        head: str | None = None,
        head_record: Callable[[], tuple[int, int]] | None = None,
        trace: Callable[[str], object] | None = None,
        waits_for_head: bool = False,
    ) -> None:
        """`notify` receives messages. `head` is the name of the draft head, None without one.
        `head_record` returns the number of chains and trees of the head that were compared with
        sampled tokens, and the total number of their correct draft tokens. By default all verified
        drafts count as the head's. `trace` receives the lines of the trace. `waits_for_head`: the
        head is untrained, and nothing is drafted before it is updated."""
        self._selector = selector
        # Stored, because `min_acceptance` is called in every step.
        self._threshold = selector if isinstance(selector, HasMinAcceptance) else None
        self._notify = notify
        self._head = head
        self._head_record = head_record or self._record_of_all
        # Counts of the head at the start of the current window.
        self._window_start = (0, 0)
        self._trace, self._waits_for_head = trace, waits_for_head
        self._steps = self._verifications = self._accepted = self._skipped = 0
        self._drafted_steps = 0
        self._reported_useless = False
        self._write({"selector": "new"})

    def begin_rollout(self, requests: int) -> int:
        """Pass on and record the start of a rollout, unless drafts wait for a trained head."""
        if self._waits_for_head:
            return UNTIL_HEAD
        plain_steps = self._selector.begin_rollout(requests)
        self._skipped += plain_steps > 0
        if self._skipped == _USELESS_ROLLOUTS:
            self._report_useless(f"with about {requests} concurrent requests it saved too little")
        self._write({"begins": requests})
        return plain_steps

    def select(self, running: int) -> DraftPlan:
        """The plan of the wrapped selector."""
        return self._selector.select(running)

    def choices(self, running: int) -> Sequence[DraftPlan] | None:
        """All plans that the wrapped selector may return; None if it does not list them."""
        return self._selector.choices(running) if isinstance(self._selector, ListsChoices) else None

    def min_acceptance(self, running: int) -> float:
        """The threshold of the wrapped selector; 0 if it has none."""
        return 0.0 if self._threshold is None else self._threshold.min_acceptance(running)

    def record(self, step: StepRecord) -> None:
        """Pass on and trace a step, and check the draft head and the gain."""
        self._selector.record(step)
        self._steps += 1
        if step.drafted:
            self._drafted_steps += 1
            self._verifications += len(step.drafted)
            self._accepted += sum(step.accepted)
            self._check_head()
        if self._steps % _USELESS_AFTER == 0 and not self._reported_useless:
            self._check_gain()
        if self._trace is not None:  # Without a trace, do not spend time on building the line.
            self._write(
                {
                    "running": step.running,
                    "plan": str(step.plan),
                    "seconds": step.seconds,
                    "drafted": list(step.drafted),
                    "accepted": list(step.accepted),
                    "steady": step.steady,
                    "straight": list(step.straight),
                }
            )

    def changed(self, *, drafter: bool = False) -> None:
        """Pass on and trace an update of the policy or the drafter."""
        if drafter:
            self._waits_for_head = False
        self._selector.changed(drafter=drafter)
        self._write({"changed": "drafter" if drafter else "policy"})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace(json.dumps(line) + "\n")

    def _record_of_all(self) -> tuple[int, int]:
        return self._verifications, self._accepted

    def _check_head(self) -> None:
        if self._head is None or self._drafted_steps < _FAULT_STEPS:
            return
        now = self._head_record()
        compared, correct = (new - old for new, old in zip(now, self._window_start, strict=True))
        # Left: upper bound (99 %) of the mean of a Poisson distribution, from its observed value.
        if correct + 2.5 * math.sqrt(correct) + 5 < _FAULT_RATE * compared:
            self._notify(
                f"warning: almost no draft of the draft head {self._head} is accepted: "
                f"{1 + correct / compared:.2f} tokens per verification in {compared} "
                "verifications (1 means that no draft was accepted). The head belongs to another "
                "policy or is not trained: train one for this policy with `slipstream draft`, or "
                "set speculative.spec_strategy=history"
            )
            self._head = None
        elif compared >= _FAULT_WINDOW:
            # Start a new window, so that a head that becomes bad later is noticed.
            self._window_start = now

    def _check_gain(self) -> None:
        if isinstance(self._selector, CostModelSelector):
            best = self._selector.best_speedup()
            if best is not None and best <= 1.0:
                self._report_useless(
                    f"no plan was faster than plain decoding at any batch size in {self._steps} "
                    "steps"
                )

    def _report_useless(self, reason: str) -> None:
        if not self._reported_useless:
            if self._verifications:
                length = 1 + self._accepted / self._verifications
                reason += (
                    f" ({length:.2f} tokens per verification in {self._verifications} "
                    "verifications)"
                )
            self._notify(
                f"speculative decoding has turned itself off: {reason}. It continues to probe from "
                "time to time; set speculative.enable=false to avoid the probes"
            )
        self._reported_useless = True


@dataclass(frozen=True, slots=True)
class Started:
    """A new selector starts: the first one, or the one of another engine or a resumed run."""


@dataclass(frozen=True, slots=True)
class Begins:
    """A rollout starts: `requests` requests arrived at an idle engine."""

    requests: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The policy, or the drafter, has new weights."""

    drafter: bool


def read_trace(lines: Iterable[str]) -> Iterator[StepRecord | Started | Begins | Changed]:
    """Parse the lines of a trace. Raises ValueError for a line that is not part of a trace."""
    for number, line in enumerate(lines, start=1):
        try:
            event = _event_of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} is not a line of a trace: {error}") from error
        yield event


def _event_of(event: Mapping[str, Any]) -> StepRecord | Started | Begins | Changed:
    if "selector" in event:
        return Started()
    if "begins" in event:
        return Begins(event["begins"])
    if "changed" in event:
        return Changed(event["changed"] == "drafter")
    return StepRecord(
        running=event["running"],
        plan=DraftPlan.parse(event["plan"]),
        seconds=event["seconds"],
        drafted=event["drafted"],
        accepted=event["accepted"],
        steady=event["steady"],
        # Missing in traces of earlier versions.
        straight=[(drafts, accepted) for drafts, accepted in event.get("straight", ())],
    )


def replay(
    lines: Iterable[str], make: Callable[[], StrategySelector]
) -> list[tuple[DraftPlan, DraftPlan]]:
    """For each step of a trace, the plan that another selector chooses, and the recorded plan.

    The selector learns from the recorded steps, whatever it chose. `make` returns a new selector
    for each one in the trace. A selector with the same settings chooses the recorded plans, except
    in steps without drafts for lack of memory.
    """
    pairs = []
    selector = make()
    for event in read_trace(lines):
        match event:
            case Started():
                selector = make()
            case Begins(requests):
                selector.begin_rollout(requests)
            case Changed(drafter):
                selector.changed(drafter=drafter)
            case StepRecord():
                pairs.append((selector.select(event.running), event.plan))
                selector.record(event)
    return pairs


def plan_table(selector: StrategySelector, bs_threshold: int | None) -> str:
    """A line that lists the plans of a selector and the batch sizes that it drafts for."""
    limit = "any number of" if bs_threshold is None else f"up to {bs_threshold}"
    if isinstance(selector, CostModelSelector):
        plans = " ".join("off" if plan == OFF else str(plan) for plan in selector.plans)
        return f"plans {plans} by measured cost, for {limit} running requests"
    if isinstance(selector, BanditSelector):
        return f"plans {selector.table()}, for {limit} running requests"
    return f"plan {selector.select(1)}, for {limit} running requests"
