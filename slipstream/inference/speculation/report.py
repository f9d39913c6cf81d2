"""What a selector does, said and recorded: a decorator around any of them.

Messages come once: that nothing is gained, and that a draft head is never right. A trace has a JSON
line for each step that was asked about and each event between steps, and can be replayed through a
selector of the same settings (`read_trace`, `replay`).
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
    CostModelSelector,
    HasMinAcceptance,
    ListsChoices,
    StepRecord,
    StrategySelector,
)

_FAULT_RATE = 0.1
"""Drafts accepted per verification below which a head is at fault, if that is beyond doubt: a
selector that gains nothing by a head hardly lets it draft, so few verifications have to do."""

_FAULT_STEPS = 4
"""Steps with drafts before a head is judged: requests of one step resemble each other."""

_FAULT_WINDOW = 500
"""Verifications after which a head that was right is looked at anew."""

_USELESS_AFTER = 1000
"""Steps before it is said that nothing is gained."""


_USELESS_ROLLOUTS = 3
"""Rollouts that nobody drafted for before it is said."""


class ReportedSelector:
    """`StrategySelector` that passes everything on to `selector`."""

    def __init__(
        self,
        selector: StrategySelector,
        *,
        notify: Callable[[str], None],
        head: str | None = None,
        head_record: Callable[[], tuple[int, int]] | None = None,
        trace: Callable[[str], object] | None = None,
    ) -> None:
        """`head` names the draft head, where there is one. `head_record` has how often its drafts
        were compared and how many were right, where not all drafts are its own. `trace` takes line
        after line."""
        self._selector = selector
        # Asked for in every step.
        self._judge = selector if isinstance(selector, HasMinAcceptance) else None
        self._notify = notify
        self._head = head
        self._head_record = head_record or self._record_of_all
        self._judged = (0, 0)
        self._trace = trace
        self._steps = self._verifications = self._accepted = self._skipped = 0
        self._drafted_steps = 0
        self._said_useless = False
        self._write({"selector": "new"})

    def begin_rollout(self, requests: int) -> int:
        """See `StrategySelector`."""
        unseen = self._selector.begin_rollout(requests)
        self._skipped += unseen > 0
        if self._skipped == _USELESS_ROLLOUTS:
            self._say_useless(f"with about {requests} requests at once it gained next to nothing")
        self._write({"begins": requests})
        return unseen

    def select(self, running: int) -> DraftPlan:
        """See `StrategySelector`."""
        return self._selector.select(running)

    def choices(self, running: int) -> Sequence[DraftPlan] | None:
        """See `ListsChoices`."""
        return self._selector.choices(running) if isinstance(self._selector, ListsChoices) else None

    def min_acceptance(self, running: int) -> float:
        """See `HasMinAcceptance`."""
        return 0.0 if self._judge is None else self._judge.min_acceptance(running)

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""
        self._selector.record(step)
        self._steps += 1
        if step.drafted:
            self._drafted_steps += 1
            self._verifications += len(step.drafted)
            self._accepted += sum(step.accepted)
            self._check_head()
        if self._steps % _USELESS_AFTER == 0 and not self._said_useless:
            self._check_gain()
        if self._trace is not None:  # Without one, no step should pay for the line.
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
        """See `StrategySelector`."""
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
        compared, right = (new - old for new, old in zip(now, self._judged, strict=True))
        # On the left, how many would be right on average, at most (99 %, of a Poisson law).
        if right + 2.5 * math.sqrt(right) + 5 < _FAULT_RATE * compared:
            self._notify(
                f"warning: the draft head {self._head} is almost never right: "
                f"{1 + right / compared:.2f} tokens per verification over {compared} of them, "
                "where 1 means that no draft was accepted. It belongs to another policy, or is not "
                "trained: train one for this policy with `slipstream draft`, or set "
                "speculative.spec_strategy=history"
            )
            self._head = None
        elif compared >= _FAULT_WINDOW:
            # A head that was right once is looked at anew from here on.
            self._judged = now

    def _check_gain(self) -> None:
        if isinstance(self._selector, CostModelSelector):
            best = self._selector.best_speedup()
            if best is not None and best <= 1.0:
                self._say_useless(
                    f"no plan was faster than plain decoding at any batch size in {self._steps} "
                    "steps"
                )

    def _say_useless(self, why: str) -> None:
        if not self._said_useless:
            if self._verifications:
                length = 1 + self._accepted / self._verifications
                why += f" ({length:.2f} tokens per verification over {self._verifications} of them)"
            self._notify(
                f"speculative decoding has turned itself off: {why}. It goes on looking now and "
                "then; speculative.enable=false spares even that"
            )
        self._said_useless = True


@dataclass(frozen=True, slots=True)
class Started:
    """A selector that has seen nothing yet: of another engine, or of a run that was resumed."""


@dataclass(frozen=True, slots=True)
class Begins:
    """Requests begin where none was left."""

    requests: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The policy, or the drafter, has other weights."""

    drafter: bool


def read_trace(lines: Iterable[str]) -> Iterator[StepRecord | Started | Begins | Changed]:
    """What a trace tells of. Raises ValueError for a line of something else."""
    for number, line in enumerate(lines, start=1):
        try:
            event = _event_of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} is none of a trace: {error}") from error
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
        # Not in the traces of earlier versions.
        straight=[(drafts, right) for drafts, right in event.get("straight", ())],
    )


def replay(
    lines: Iterable[str], make: Callable[[], StrategySelector]
) -> list[tuple[DraftPlan, DraftPlan]]:
    """What a selector would choose at each step of a trace, beside what was chosen.

    It is told what happened then. `make` makes one anew for each that the trace tells of; those of
    the same settings choose the same plans, except where a lack of memory had turned drafts off.
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
    """The plans that a selector chooses from, in one line."""
    limit = "any number of" if bs_threshold is None else f"up to {bs_threshold}"
    if isinstance(selector, CostModelSelector):
        plans = " ".join("off" if plan == OFF else str(plan) for plan in selector.plans)
        return f"plans {plans} by measured cost, for {limit} running requests"
    if isinstance(selector, BanditSelector):
        return f"plans {selector.table()}, for {limit} running requests"
    return f"plan {selector.select(1)}, for {limit} running requests"
