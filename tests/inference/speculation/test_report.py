"""What is said and recorded of speculation."""

from __future__ import annotations

import io
import json

import torch

from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import ReportedSelector, plan_table, replay
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
)
from slipstream.models.draft_head import DraftHead
from tests.inference.helpers import make_engine, make_request, shared_decoder

PLANS = [DraftPlan.chain(1), DraftPlan.chain(2)]


def step(plan: DraftPlan, accepted: int, *, seconds: float = 1.0, running: int = 1) -> StepRecord:
    drafted = [plan.steps] * running if plan.steps else []
    return StepRecord(
        running=running,
        plan=plan,
        seconds=seconds,
        drafted=drafted,
        accepted=[accepted] * len(drafted),
    )


def test_a_head_that_is_never_right_is_reported_once() -> None:
    said: list[str] = []
    plan = DraftPlan.chain(2)
    reported = ReportedSelector(PredefinedSelector(plan), notify=said.append, head="runs/x/draft")
    for _ in range(499):
        reported.record(step(plan, 0))
    assert not said
    for _ in range(2000):
        reported.record(step(plan, 0))
    (message,) = said
    assert "the draft head runs/x/draft is almost never right: 1.00 tokens per" in message
    assert "`slipstream draft`" in message


def test_a_head_that_is_right_now_and_then_is_not() -> None:
    said: list[str] = []
    plan = DraftPlan.chain(2)
    reported = ReportedSelector(PredefinedSelector(plan), notify=said.append, head="x")
    for i in range(3000):
        reported.record(step(plan, i % 10 == 0))
    assert not said
    # It may become useless later on.
    for _ in range(1000):
        reported.record(step(plan, 0))
    assert len(said) == 1


def test_that_nothing_is_gained_is_said_once() -> None:
    said: list[str] = []
    reported = ReportedSelector(CostModelSelector(PLANS), notify=said.append)
    for _ in range(5000):
        plan = reported.select(3) or OFF
        reported.record(step(plan, 0, seconds=1 + plan.steps, running=3))
    (message,) = said
    assert "turned itself off: no plan was faster than plain decoding" in message
    assert "speculative.enable=false" in message


def test_that_drafts_rest_is_said_once() -> None:
    said: list[str] = []
    reported = ReportedSelector(CostModelSelector(PLANS), notify=said.append)
    resting = 0
    for number in range(5000):
        if number % 200 == 0:
            reported.idle()
        plan = reported.select(3)
        if plan is None:
            resting += 1
        else:
            reported.record(step(plan, 0, seconds=1 + plan.steps, running=3))
    assert resting > 2500
    (message,) = said
    assert "turned itself off: with about 3 requests at once it gained next to nothing" in message
    assert "speculative.enable=false" in message
    while reported.select(3) is not None:
        reported.record(step(OFF, 0, running=3))
        reported.idle()
    reported.changed()
    assert reported.select(3) is None
    reported.changed(drafter=True)
    assert reported.select(3) is not None


def test_a_trace_replays_to_the_same_decisions() -> None:
    trace = io.StringIO()
    reported = ReportedSelector(CostModelSelector(PLANS), notify=print, trace=trace.write)
    for number in range(1000):
        if number == 200:
            reported.changed()
        if number == 300:
            reported.changed(drafter=True)
        if number >= 400 and number % 150 == 0:
            reported.idle()
        running = 1 + number % 3
        plan = reported.select(running)
        if plan is not None:
            right = plan.steps * (number % 2) * (number < 400)
            seconds = 1 + 0.3 * plan.steps * running
            reported.record(step(plan, right, seconds=seconds, running=running))
    lines = trace.getvalue().splitlines()
    assert json.loads(lines[200]) == {"event": "policy"}
    assert json.loads(lines[301]) == {"event": "drafter"}
    assert sum(json.loads(line) == {"event": "idle"} for line in lines) == 4
    pairs = replay(lines, CostModelSelector(PLANS))
    assert len(pairs) == len(lines) - 6 == 1000
    assert all(again == recorded for again, recorded in pairs)
    assert {str(plan) for _, plan in pairs} >= {"0_0_1", "2_1_3", "None"}
    others = replay(lines, PredefinedSelector(PLANS[0]))
    assert {plan for plan, _ in others} == {PLANS[0]}


def test_the_plans_in_a_line() -> None:
    assert plan_table(CostModelSelector(PLANS), 32) == (
        "plans off 1_1_2 2_1_3 by measured cost, for up to 32 running requests"
    )
    fixed = PredefinedSelector(PLANS[1])
    assert plan_table(fixed, None) == "plan 2_1_3, for any number of running requests"


def test_an_engine_reports_what_it_does() -> None:
    head = DraftHead(shared_decoder().config)
    head.init_weights(1)
    trace = io.StringIO()
    reported = ReportedSelector(CostModelSelector(PLANS), notify=print, trace=trace.write)
    engine = make_engine(
        proposer=EagleProposer(head, dtype=torch.float32), selector=reported, max_num_seqs=2
    )
    engine.run([make_request(f"e{i}", max_tokens=60, ignore_eos=True) for i in range(4)])
    *events, last = [json.loads(line) for line in trace.getvalue().splitlines()]
    assert last == {"event": "idle"}
    stats = engine.stats()
    assert len(events) == stats.decode_steps
    assert sum(sum(event["drafted"]) for event in events) == stats.draft_tokens
    assert sum(sum(event["accepted"]) for event in events) == stats.accepted_tokens
    assert sum(len(event["drafted"]) for event in events) == stats.verifications
    assert {event["plan"] for event in events} > {str(OFF)}
    assert stats.draft_steps == sum(bool(event["drafted"]) for event in events)
    assert sum(stats.batch_tokens) == stats.decode_tokens
    assert sum(stats.batch_seconds) == stats.decode_seconds
    # Steps that had to catch up with new requests are marked.
    assert {event["steady"] for event in events} == {True, False}
