"""Tests of the union of a draft head and history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.inference.speculation.union import HeadTime, UnionProposer
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.types import UpdateKind, WeightUpdate
from tests.inference.helpers import all_bits, make_engine, mixed_requests, shared_decoder

PROMPT = (1, 2, 3)
PLAN = DraftPlan.chain(3)


class ConstantHead:
    """A draft head that always drafts the same tokens, and records its calls."""

    aux_layers = ()

    def __init__(self, drafts: Sequence[int]) -> None:
        self.drafts = drafts
        self.calls: list[str] = []
        self.depths: list[int] = []

    def begin(self, request_id: str, *_: Any) -> None:
        self.calls.append(f"begin {request_id}")

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        return batch.chains([self.drafts[: plan.steps]] * len(batch.request_ids))

    def observe(self, request_ids: Sequence[str], tokens: Any, features_NWD: Any) -> None:
        self.calls.append(f"observe {tokens}")

    def end(self, request_id: str) -> None:
        self.calls.append(f"end {request_id}")

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        self.calls.append(f"remember {context[known:]}")

    def update(self, update: WeightUpdate) -> None:
        self.calls.append(f"update {update.version}")

    def policy_changed(self) -> None:
        self.calls.append("policy changed")


def batch(name: str, last: int) -> DraftBatch:
    with torch.no_grad():
        policy = shared_decoder().pack(torch.float32)
    unused: dict[str, Any] = {"positions_N": None, "rows": None}
    return DraftBatch(request_ids=[name], last=[last], policy=policy, **unused)


def proposed(union: UnionProposer, name: str, last: int) -> list[int]:
    (tree,) = union.propose(batch(name, last), PLAN)
    return list(tree.tokens[1:])


def test_the_chain_with_the_better_record_is_proposed() -> None:
    # Drafting takes no time, so the head is always asked.
    head_time = HeadTime(lambda: 0.0)
    union = UnionProposer(ConstantHead([7, 7, 7]), HistoryProposer(), head_time)
    text = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
    union.begin("a", PROMPT, PROMPT, None)
    union.observe(["a"], [text], None)
    union.end("a")
    # Without a match in the history, the head's chain is proposed; a new head drafts one token.
    union.begin("b", PROMPT, [*PROMPT, 50, 51], None)
    assert proposed(union, "b", 51) == [7]
    union.observe(["b"], [[52]], None)
    for _ in range(30):  # no draft of the head is accepted
        proposed(union, "b", 52)
        union.observe(["b"], [[53]], None)
    assert union.head_record == (31, 0)
    union.end("b")
    union.begin("c", PROMPT, [*PROMPT, 20, 21, 22], None)
    assert proposed(union, "c", 22) == [23, 24, 25]
    union.end("c")
    # Now the head's drafts are accepted, and those of history with the same match length are not.
    union.begin("d", PROMPT, [*PROMPT, 20, 21, 22], None)
    for _ in range(300):
        proposed(union, "d", 22)
        union._history._running["d"].context[:] = [*PROMPT, 20, 21, 22]
        union.observe(["d"], [[7, 7, 7, 7]], None)
        union._history._running["d"].context[:] = [*PROMPT, 20, 21, 22]
    assert proposed(union, "d", 22) == [7, 7, 7]
    assert union.head_record == (331, 900)


def test_all_calls_are_passed_on_to_the_head() -> None:
    head = ConstantHead([5])
    union = UnionProposer(head, HistoryProposer())
    union.begin("a", PROMPT, PROMPT, None)
    proposed(union, "a", 3)
    union.observe(["a"], [[4]], None)
    union.end("a")
    union.end("unknown")
    assert head.calls == ["begin a", "observe [[4]]", "end a", "end unknown"]


def test_union_chains_do_not_change_the_generated_tokens() -> None:
    requests = mixed_requests(8, tokens=24)
    reference = all_bits(make_engine().run(requests))
    head = DraftHead(shared_decoder().config)
    head.init_weights(1)
    union = UnionProposer(EagleProposer(head, dtype=torch.float32), HistoryProposer(match=1))
    engine = make_engine(proposer=union, plan=PLAN, max_num_seqs=3)
    for _ in range(2):  # in the second pass, history has the responses
        assert all_bits(engine.run(requests)) == reference
    stats = engine.stats()
    assert stats.accepted_tokens > 0.2 * stats.draft_tokens
    assert not union._offers


def test_draft_updates_are_passed_on_to_the_head() -> None:
    head = ConstantHead([7])
    engine = make_engine(proposer=UnionProposer(head, HistoryProposer()), plan=PLAN)
    engine.update_drafter(WeightUpdate(version=5, buckets=[], kind=UpdateKind.DRAFT))
    assert head.calls == ["update 5"]


def test_a_step_with_many_requests_fades_acceptance_once() -> None:
    union = UnionProposer(ConstantHead([7, 7, 7]), HistoryProposer())
    names = [f"r{i}" for i in range(40)]
    for name in names:
        union.begin(name, PROMPT, PROMPT, None)
    union._head_curve.record([9], [9])
    before = union._head_curve._tried[8]
    for name in names:
        union.propose(batch(name, 3), PLAN)
    union.observe(names, [[7, 7, 7, 7]] * len(names), None)
    assert union._head_curve._tried[8] == pytest.approx(0.99 * before)
    assert union._head_curve._tried[0] > 30


def test_trees_of_head_and_history_are_merged() -> None:
    class Branching(ConstantHead):
        """A head that drafts a tree with scores."""

        def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
            scores = [-0.1, -2.5, -0.3, -2.0]
            return [
                DraftTree([last, 23, 40, 41, 42], [-1, 0, 0, 1, 1], 4, scores, 43)
                for last in batch.last
            ]

    union = UnionProposer(Branching([]), HistoryProposer())
    text = [20, 21, 22, 23, 24, 25, 26]
    union.begin("a", PROMPT, PROMPT, None)
    union.observe(["a"], [text], None)
    union.end("a")
    union.begin("b", PROMPT, [*PROMPT, 20, 21, 22], None)
    (tree,) = union.propose(batch("b", 22), DraftPlan(3, 2, 6))
    # History adds 24 and 25 after 23, which both drafted. The head's node 40 has the worst score
    # and is left out.
    assert list(tree.tokens) == [22, 23, 41, 42, 24, 25]
    assert list(tree.parents) == [-1, 0, 1, 1, 1, 4]
    assert tree.by_head == 3
    assert tree.scores is not None
    assert list(tree.scores)[:3] == [-0.1, -0.3, -2.0]
    # The head would follow 41 with 43, but the history extended its tree.
    assert tree.left_out is None
    union.observe(["b"], [[23, 41, 50]], None)
    assert union.head_record == (1, 2)
    (tree,) = union.propose(batch("b", 50), DraftPlan(3, 2, 4))
    assert list(tree.tokens) == [50, 23, 41, 42]
    assert tree.left_out == 43  # All of the head's chain 23, 41 is kept.
    # Nodes below the min acceptance probability are left out.
    for least, tokens, left_out in ((0.6, [50, 23, 41], 43), (0.8, [50, 23], 41), (0.95, [50], 23)):
        (tree,) = union.propose(replace(batch("b", 50), min_acceptance=least), DraftPlan(3, 2, 6))
        assert (list(tree.tokens), tree.left_out) == (tokens, left_out)


@pytest.mark.parametrize("plan", [DraftPlan(4, 2, 8), DraftPlan(5, 4, 12)], ids=str)
def test_merged_trees_do_not_change_the_generated_tokens(plan: DraftPlan) -> None:
    requests = mixed_requests(9, tokens=30)
    reference = make_engine().run(requests)
    head = DraftHead(shared_decoder().config)
    head.init_weights(0)
    union = UnionProposer(EagleProposer(head, dtype=torch.float32), HistoryProposer())
    engine = make_engine(proposer=union, plan=plan, max_num_seqs=4)
    assert all_bits(engine.run(requests)) == all_bits(reference)
    stats = engine.stats()
    assert 0 < stats.head_draft_tokens < stats.draft_tokens
    assert stats.accepted_tokens > 0


def test_the_head_is_not_asked_if_history_alone_is_faster() -> None:
    """Each token that the head drafts takes a second, and the rest of the step seven."""
    now = [0.0]

    class Slow(ConstantHead):
        def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
            self.calls.append("propose")
            self.depths.append(plan.steps)
            now[0] += 1.0 * plan.steps
            return super().propose(batch, plan)

    head = Slow([1, 2, 3])
    union = UnionProposer(head, HistoryProposer(), HeadTime(lambda: now[0]))
    text = [20 + i % 9 for i in range(1200)]
    union.begin("a", PROMPT, [*PROMPT, *text[:40]], None)
    asked = []
    at = 40
    for _ in range(260):
        before = head.calls.count("propose")
        (tree,) = union.propose(batch("a", text[at - 1]), DraftPlan.chain(3))
        asked.append(head.calls.count("propose") > before)
        assert list(tree.tokens[1:]) in ([1], text[at : at + 3])
        now[0] += 7.0
        accepted = 3 if list(tree.tokens[1:]) == text[at : at + 3] else 0
        union.observe(["a"], [text[at : at + accepted + 1]], None)
        at += accepted + 1
    # At first the head is asked, until its drafts and time are known; then after 32 steps, 64 ...
    # Each time it is asked in two steps, because the first one includes the tokens that it missed.
    first = asked.index(False)
    assert 8 <= first <= 10
    later = [step for step, was_asked in enumerate(asked) if was_asked and step > first]
    pairs = [first + 31, first + 32 + 64, first + 33 + 64 + 128]
    assert later == [step + more for step in pairs for more in (0, 1)]
    assert set(head.depths) == {1}
    # A changed head is asked at once.
    union.update(WeightUpdate(version=2, buckets=[], kind=UpdateKind.DRAFT))
    before = head.calls.count("propose")
    union.propose(batch("a", text[at - 1]), DraftPlan.chain(3))
    assert head.calls.count("propose") == before + 1


def test_the_head_is_asked_if_it_is_faster() -> None:
    head = ConstantHead([30, 31, 32])
    union = UnionProposer(head, HistoryProposer(), HeadTime(lambda: 0.0))
    union.begin("a", PROMPT, [*PROMPT, 29], None)
    drafted = []
    for step in range(40):
        (tree,) = union.propose(batch("a", 29), DraftPlan.chain(3))
        drafted.append(list(tree.tokens[1:]))
        # The last token is always another one, so history finds nothing.
        union.observe(["a"], [[30, 31, 32, 50 + step]], None)
    # A new head drafts one token, until eight of them were compared. Their weights fade.
    first = drafted.index([30, 31, 32])
    assert 8 <= first <= 10
    assert drafted == [[30]] * first + [[30, 31, 32]] * (40 - first)


def test_a_slow_first_call_of_the_head_does_not_count() -> None:
    now, calls = [0.0], [0]
    time = HeadTime(lambda: now[0])

    def draft() -> None:
        calls[0] += 1
        now[0] += 100.0 if calls[0] == 1 else 0.1

    for _ in range(3):
        assert time.drafts(5, 1, 0, 2.0, 1.9) == 1
        time.measured(1, 1, draft)
        now[0] += 10.0
        time.step_ended()
    # Five drafts take half a second of ten. They gain a ninth of the tokens, then nothing.
    assert time.drafts(5, 1, 20, 2.1, 1.9) == 5
    assert time.drafts(5, 1, 20, 1.9, 1.9) == 0


def test_a_catch_up_of_the_head_is_not_measured() -> None:
    now = [0.0]
    time = HeadTime(lambda: now[0])

    def step(draft_seconds: float, both: float = 2.0) -> int:
        drafts = time.drafts(5, 1, 20, both, 1.5)
        if drafts:

            def draft() -> None:
                now[0] += draft_seconds * drafts

            time.measured(drafts, 1, draft)
        now[0] += 1.0
        if drafts:
            time.step_ended()
        else:
            time.plain_step()
        return drafts

    # After plain steps, the first draft of a new batch size takes long, and the second does not.
    time.plain_step()
    assert step(3.0) == 1
    assert step(0.01) == 1
    assert step(0.01) == 5


def test_a_head_that_was_slow_once_is_measured_again() -> None:
    now = [0.0]
    time = HeadTime(lambda: now[0])
    asked = []
    for number in range(400):
        drafts = time.drafts(5, 1, 20, 2.0, 1.5)
        asked.append(drafts)
        if drafts:

            def draft(number: int = number, drafts: int = drafts) -> None:
                now[0] += drafts * (1.0 if number < 3 else 0.01)

            time.measured(drafts, 1, draft)
        now[0] += 1.0
        if drafts:
            time.step_ended()
        else:
            time.plain_step()
    # Another program disturbed the first steps. Later the head drafts in every step again.
    assert 0 in asked[:10]
    assert asked[-50:] == [5] * 50
