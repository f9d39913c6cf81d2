"""What a selector does, said and recorded: a decorator around any of them.

Messages come once: that nothing is gained, and that a draft head is never right. A trace has a JSON
line for each step and each event between steps, and can be replayed through a selector of the same
settings (`read_trace`, `replay`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    StepRecord,
    StrategySelector,
)

FAULT_LENGTH = 1.05
"""Tokens per verification at which drafts are no better than none."""

_FAULT_AFTER = 500
"""Verifications before a draft head is judged."""

_USELESS_AFTER = 1000
"""Steps before it is said that nothing is gained."""


class Event(StrEnum):
    """What a selector is told of between steps."""

    IDLE = "idle"
    POLICY = "policy"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Resting:
    """A step of `running` requests that nothing is drafted for."""

    running: int


class ReportedSelector:
    """`StrategySelector` that passes everything on to `selector`."""

    def __init__(
        self,
        selector: StrategySelector,
        *,
        notify: Callable[[str], None],
        head: str | None = None,
        trace: Callable[[str], object] | None = None,
    ) -> None:
        """`head` names the draft head, where there is one; `trace` takes line after line."""
        self._selector = selector
        self._notify = notify
        self._head = head
        self._trace = trace
        self._steps = self._verifications = self._accepted = 0
        self._said_useless = False

    def select(self, running: int) -> DraftPlan | None:
        """See `StrategySelector`."""
        plan = self._selector.select(running)
        if plan is None:
            self._say_useless(f"with about {running} requests at once it gained next to nothing")
            self._write({"running": running, "plan": None})
        return plan

    def record(self, step: StepRecord) -> None:
        """See `StrategySelector`."""
        self._selector.record(step)
        self._steps += 1
        self._verifications += len(step.drafted)
        self._accepted += sum(step.accepted)
        if self._head is not None and self._verifications >= _FAULT_AFTER:
            self._check_head(self._head)
        if self._steps % _USELESS_AFTER == 0 and not self._said_useless:
            self._check_gain()
        if self._trace is not None:
            self._write(
                {
                    "running": step.running,
                    "plan": str(step.plan),
                    "seconds": step.seconds,
                    "drafted": list(step.drafted),
                    "accepted": list(step.accepted),
                    "steady": step.steady,
                }
            )

    def idle(self) -> None:
        """See `StrategySelector`."""
        self._selector.idle()
        self._write({"event": Event.IDLE})

    def changed(self, *, drafter: bool = False) -> None:
        """See `StrategySelector`."""
        self._selector.changed(drafter=drafter)
        self._write({"event": Event.DRAFTER if drafter else Event.POLICY})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace(json.dumps(line) + "\n")

    def _check_head(self, head: str) -> None:
        length = 1 + self._accepted / self._verifications
        if length < FAULT_LENGTH:
            self._notify(
                f"warning: the draft head {head} is almost never right: {length:.2f} tokens per "
                f"verification over {self._verifications} of them, where 1 means that no draft was "
                "accepted. It belongs to another policy, or is not trained: train one for this "
                "policy with `slipstream draft`, or set speculative.spec_strategy=history"
            )
            self._head = None
        else:
            # A head that was right once is looked at anew from here on.
            self._verifications = self._accepted = 0

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
            self._notify(
                f"speculative decoding has turned itself off: {why}. It goes on looking now and "
                "then; speculative.enable=false spares even that"
            )
        self._said_useless = True


def read_trace(lines: Iterable[str]) -> Iterator[StepRecord | Resting | Event]:
    """What a trace tells of. Raises ValueError for a line of something else."""
    for number, line in enumerate(lines, start=1):
        try:
            yield _read(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} is none of a trace: {error}") from error


def _read(event: Mapping[str, Any]) -> StepRecord | Resting | Event:
    if "event" in event:
        return Event(event["event"])
    if event["plan"] is None:
        return Resting(event["running"])
    return StepRecord(
        running=event["running"],
        plan=DraftPlan.parse(event["plan"]),
        seconds=event["seconds"],
        drafted=event["drafted"],
        accepted=event["accepted"],
        steady=event["steady"],
    )


def replay(
    lines: Iterable[str], selector: StrategySelector
) -> list[tuple[DraftPlan | None, DraftPlan | None]]:
    """What `selector` would choose at each step of a trace, beside what was chosen.

    It is told what happened then. A selector of the same settings chooses the same plans, except
    where a lack of memory had turned drafts off.
    """
    pairs: list[tuple[DraftPlan | None, DraftPlan | None]] = []
    for step in read_trace(lines):
        match step:
            case Event.IDLE:
                selector.idle()
            case Event():
                selector.changed(drafter=step is Event.DRAFTER)
            case Resting():
                pairs.append((selector.select(step.running), None))
            case StepRecord():
                pairs.append((selector.select(step.running), step.plan))
                selector.record(step)
    return pairs


def plan_table(selector: StrategySelector, bs_threshold: int | None) -> str:
    """The plans that a selector chooses from, in one line."""
    limit = "any number of" if bs_threshold is None else f"up to {bs_threshold}"
    if isinstance(selector, CostModelSelector):
        plans = " ".join("off" if plan == OFF else str(plan) for plan in selector.plans)
        return f"plans {plans} by measured cost, for {limit} running requests"
    return f"plan {selector.select(1)}, for {limit} running requests"
