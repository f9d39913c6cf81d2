"""Tests of messages and traces of speculative decoding."""

from __future__ import annotations

import io
import json

import pytest
import torch

from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.report import ReportedSelector, plan_table, replay
from slipstream.inference.speculation.selector import (
    UNTIL_HEAD,
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
)
from slipstream.models.draft.eagle1 import DraftHead
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


def test_a_head_without_accepted_drafts_is_reported_once() -> None:
    messages: list[str] = []
    plan = DraftPlan.chain(2)
    reported = ReportedSelector(
        PredefinedSelector(plan), notify=messages.append, head="runs/x/draft"
    )
    for _ in range(50):
        reported.record(step(plan, 0))
    assert not messages
    for _ in range(2000):
        reported.record(step(plan, 0))
    (message,) = messages
    assert "draft head runs/x/draft is accepted: 1.00 tokens per" in message
    assert "`slipstream draft`" in message


def test_nothing_is_drafted_before_an_untrained_head_is_updated() -> None:
    lines: list[str] = []
    reported = ReportedSelector(
        CostModelSelector(PLANS), notify=print, trace=lines.append, waits_for_head=True
    )
    assert reported.begin_rollout(4) == UNTIL_HEAD
    reported.changed()
    assert reported.begin_rollout(4) == UNTIL_HEAD
    reported.changed(drafter=True)
    assert reported.begin_rollout(4) == 0
    # A trace has the rollouts in which the selector had a choice.
    assert [json.loads(line) for line in lines] == [
        {"selector": "new"},
        {"changed": "policy"},
        {"changed": "drafter"},
        {"begins": 4},
    ]


def test_a_head_with_some_accepted_drafts_is_not_reported() -> None:
    messages: list[str] = []
    plan = DraftPlan.chain(2)
    reported = ReportedSelector(PredefinedSelector(plan), notify=messages.append, head="x")
    for i in range(3000):
        reported.record(step(plan, i % 8 == 0))
    assert not messages
    # A head that becomes bad later is reported.
    for _ in range(1000):
        reported.record(step(plan, 0))
    assert len(messages) == 1


def test_a_head_is_not_judged_by_a_few_steps() -> None:
    messages: list[str] = []
    plan = DraftPlan.chain(2)
    reported = ReportedSelector(PredefinedSelector(plan), notify=messages.append, head="x")
    for _ in range(3):
        reported.record(step(plan, 0, running=64))
        for _ in range(9):
            reported.record(step(OFF, 0, running=64))
    assert not messages
    reported.record(step(plan, 0, running=64))
    assert "1.00 tokens per verification in 256" in messages[0]


@pytest.mark.parametrize("running", [1, 4, 16, 64])
def test_a_bad_head_is_reported_although_the_cost_model_rarely_drafts(running: int) -> None:
    messages: list[str] = []
    plans = [DraftPlan.chain(depth) for depth in (1, 2, 3, 4, 5, 7)]
    reported = ReportedSelector(
        CostModelSelector(plans), notify=messages.append, head="runs/x/draft"
    )
    for _ in range(20):
        plain_steps = reported.begin_rollout(running)
        for _ in range(plain_steps, 400):
            plan = reported.select(running)
            seconds = 1e-3 * (1 + 0.1 * plan.steps + 0.01 * plan.steps * running)
            reported.record(step(plan, 0, seconds=seconds, running=running))
    assert "draft head runs/x/draft is accepted: 1.00 tokens per" in "".join(messages)


def test_a_head_is_judged_by_its_own_record() -> None:
    messages: list[str] = []
    plan = DraftPlan.chain(2)
    own = [0, 0]
    reported = ReportedSelector(
        PredefinedSelector(plan),
        notify=messages.append,
        head="x",
        head_record=lambda: (own[0], own[1]),
    )
    for _ in range(600):
        own[0] += 1
        own[1] += 1
        reported.record(step(plan, 2))
    assert not messages
    for _ in range(60):
        own[0] += 1
        reported.record(step(plan, 2))
    assert not messages  # Its earlier drafts in the same window were accepted.
    for _ in range(800):
        own[0] += 1
        reported.record(step(plan, 2))
    assert "draft head x is accepted" in messages[0]


def test_missing_gain_is_reported_once() -> None:
    messages: list[str] = []
    reported = ReportedSelector(CostModelSelector(PLANS), notify=messages.append)
    for _ in range(5000):
        plan = reported.select(3)
        reported.record(step(plan, 0, seconds=1 + plan.steps, running=3))
    (message,) = messages
    assert "turned itself off: no plan was faster than plain decoding" in message
    assert " steps (1.00 tokens per verification in " in message
    assert "speculative.enable=false" in message


def test_backoff_is_reported_once() -> None:
    messages: list[str] = []
    reported = ReportedSelector(CostModelSelector(PLANS), notify=messages.append)
    skipped = 0
    for _ in range(30):
        if reported.begin_rollout(3):
            skipped += 1
        else:
            for _ in range(50):
                plan = reported.select(3)
                reported.record(step(plan, 0, seconds=1 + plan.steps, running=3))
        assert len(messages) == (skipped >= 3)
    assert skipped > 10
    assert "turned itself off: with about 3 concurrent requests" in messages[0]
    assert "speculative.enable=false" in messages[0]
    while not reported.begin_rollout(3):
        for _ in range(50):
            reported.record(step(OFF, 0, running=3))
    reported.changed(drafter=True)
    before = sum(reported.begin_rollout(3) > 0 for _ in range(20))
    assert before < 8


def test_a_trace_replays_to_the_same_decisions() -> None:
    trace = io.StringIO()
    reported = ReportedSelector(CostModelSelector(PLANS), notify=print, trace=trace.write)
    asked, plain_steps = 0, 0
    for number in range(1200):
        if number == 200:
            reported.changed()
        if number == 300:
            reported.changed(drafter=True)
        if number % 200 == 0:
            plain_steps = reported.begin_rollout(3)
        if plain_steps:
            continue
        running = 1 + number % 3
        plan = reported.select(running)
        accepted = plan.steps * (number % 2) * (number < 400)
        seconds = 1 + 0.3 * plan.steps * running
        reported.record(step(plan, accepted, seconds=seconds, running=running))
        asked += 1
    lines = trace.getvalue().splitlines()
    assert json.loads(lines[0]) == {"selector": "new"}
    assert json.loads(lines[1]) == {"begins": 3}
    assert json.loads(lines[202]) == {"changed": "policy"}
    assert json.loads(lines[304]) == {"changed": "drafter"}
    pairs = replay(lines, lambda: CostModelSelector(PLANS))
    assert len(pairs) == asked == len(lines) - 9
    assert asked in (800, 1000)  # some were skipped
    assert all(again == recorded for again, recorded in pairs)
    assert {str(plan) for _, plan in pairs} >= {"0_0_1", "2_1_3"}
    # A resumed run and a second engine append to the same file.
    assert replay(lines * 2, lambda: CostModelSelector(PLANS)) == pairs * 2
    others = replay(lines, lambda: PredefinedSelector(PLANS[0]))
    assert {plan for plan, _ in others} == {PLANS[0]}

    calls: list[tuple[str, int]] = []

    class Recording(PredefinedSelector):
        def begin_rollout(self, requests: int) -> int:
            calls.append(("begins", requests))
            return 0

        def changed(self, *, drafter: bool = False) -> None:
            calls.append(("changed", drafter))

    replay(lines, lambda: Recording(PLANS[0]))
    begins = ("begins", 3)
    assert calls == [begins, ("changed", False), begins, ("changed", True), *[begins] * 4]


def test_plan_table_lists_the_plans_of_a_selector() -> None:
    assert plan_table(CostModelSelector(PLANS), 32) == (
        "plans off 1_1_2 2_1_3 by measured cost, for up to 32 running requests"
    )
    fixed = PredefinedSelector(PLANS[1])
    assert plan_table(fixed, None) == "plan 2_1_3, for any number of running requests"


def test_choices_of_the_wrapped_selector_are_passed_on() -> None:
    selector = CostModelSelector(PLANS, bs_threshold=32)
    reported = ReportedSelector(selector, notify=lambda message: None)
    assert reported.choices(32) == (OFF, *PLANS)
    assert reported.choices(33) == (OFF,)


def test_the_trace_of_an_engine_agrees_with_its_statistics() -> None:
    head = DraftHead(shared_decoder().config)
    head.init_weights(1)
    trace = io.StringIO()
    reported = ReportedSelector(CostModelSelector(PLANS), notify=print, trace=trace.write)
    engine = make_engine(
        proposer=EagleProposer(head, dtype=torch.float32), selector=reported, max_num_seqs=2
    )
    engine.run([make_request(f"e{i}", max_tokens=60, ignore_eos=True) for i in range(4)])
    new, first, *events = [json.loads(line) for line in trace.getvalue().splitlines()]
    assert (new, first) == ({"selector": "new"}, {"begins": 2})
    stats = engine.stats()
    assert len(events) == stats.decode_steps
    assert sum(sum(event["drafted"]) for event in events) == stats.draft_tokens
    assert sum(sum(event["accepted"]) for event in events) == stats.accepted_tokens
    assert sum(len(event["drafted"]) for event in events) == stats.verifications
    assert {event["plan"] for event in events} > {str(OFF)}
    assert stats.draft_steps == sum(bool(event["drafted"]) for event in events)
    assert sum(stats.batch_tokens) == stats.decode_tokens
    assert sum(stats.batch_seconds) == stats.decode_seconds
    # Steps with draft catch-up for new requests are not steady.
    assert {event["steady"] for event in events} == {True, False}
