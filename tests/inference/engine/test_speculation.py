"""Speculation changes how soon tokens come, never which: bits against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from slipstream.bench.speculation.drafters import LyingOracle
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.engine import engine as engine_module
from slipstream.inference.protocol import EngineStats
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import PredefinedSelector, StepRecord
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    StopReason,
    UpdateKind,
    WeightUpdate,
)
from tests.inference.helpers import (
    EOS,
    VOCAB,
    all_bits,
    bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    random_prompt,
    shared_decoder,
    update_from,
)


class Oracle(LyingOracle):
    """Insists on being right in the end: what comes out is what it knows."""

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: torch.Tensor | None,
    ) -> None:
        for name, new in zip(request_ids, tokens, strict=True):
            start = self._done[name]
            assert self._known[name][start : start + len(new)] == [*new]
        super().observe(request_ids, tokens, features_NWD)


def oracle_of(
    known: Sequence[Generation],
    kind: type[LyingOracle] = Oracle,
    *,
    lies: float = 0.3,
    ragged: bool = True,
) -> LyingOracle:
    responses = {generation.request_id: generation.token_ids for generation in known}
    return kind(responses, vocab_size=VOCAB, lies=lies, ragged=ragged)


def speculated(
    requests: Sequence[GenerateRequest],
    reference: Sequence[Generation],
    plan: DraftPlan,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[Generation]:
    oracle = oracle_of(reference)
    engine = make_engine(dtype=dtype, proposer=oracle, plan=plan, **settings)
    done = engine.run(requests)
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.generated_tokens == sum(len(g.token_ids) for g in done)
    assert not oracle._done
    return done


TREES = [DraftPlan(2, 2, 6), DraftPlan(4, 3, 8), DraftPlan(6, 4, 24)]


@pytest.mark.parametrize("plan", [*map(DraftPlan.chain, (1, 3, 7)), *TREES], ids=str)
def test_drafts_do_not_matter(dtype: torch.dtype, plan: DraftPlan) -> None:
    count, tokens = (14, 40) if dtype == torch.float32 else (6, 12)
    requests = mixed_requests(count, tokens=tokens)
    reference = make_engine(dtype=dtype).run(requests)
    for limit in (1, 7, 64) if dtype == torch.float32 else (7,):
        done = speculated(requests, reference, plan, dtype, max_num_seqs=limit)
        assert all_bits(done) == all_bits(reference)
        assert [g.stop_reason for g in done] == [g.stop_reason for g in reference]


def test_right_drafts_save_steps() -> None:
    requests = [make_request(f"r{i}", max_tokens=41, ignore_eos=True) for i in range(3)]
    plain = make_engine()
    reference = plain.run(requests)
    oracle = oracle_of(reference, lies=0.0, ragged=False)
    engine = make_engine(proposer=oracle, plan=DraftPlan.chain(4))
    assert all_bits(engine.run(requests)) == all_bits(reference)
    # One token comes from the prefill; then four drafts and a bonus token a step.
    assert plain.stats().decode_steps == 40
    assert engine.stats().decode_steps == 8
    assert engine.stats().accepted_tokens == 3 * 32


@pytest.mark.parametrize("plan", [DraftPlan.chain(6), DraftPlan(6, 2, 14)], ids=str)
def test_ends_inside_an_accepted_run_cut_it(plan: DraftPlan) -> None:
    decoder = make_decoder(eos=EOS)
    rng = random.Random(3)
    requests = [
        make_request(f"e{i}", random_prompt(rng, 5), max_tokens=60, stop=stop, hidden=True)
        for i, stop in enumerate([(), (), (), ("ab", "z"), ("q",), ("5", "m")])
    ]
    reference = make_engine(decoder).run(requests)
    oracle = oracle_of(reference, lies=0.05)
    # What would come after the end must not be looked at, even if it is drafted.
    oracle._known = {name: [*ids, *range(9)] for name, ids in oracle._known.items()}
    done = make_engine(decoder, proposer=oracle, plan=plan).run(requests)
    reasons = {g.stop_reason for g in reference}
    assert {StopReason.EOS, StopReason.STOP_STRING} <= reasons
    for one, other in zip(done, reference, strict=True):
        assert bits(one) == bits(other)
        assert (one.stop_reason, one.text, one.spans) == (
            other.stop_reason,
            other.text,
            other.spans,
        )
        assert one.hidden_states is not None
        assert other.hidden_states is not None
        assert torch.equal(one.hidden_states, other.hidden_states)


def test_preemption_abort_and_switching_under_drafts(dtype: torch.dtype) -> None:
    requests = mixed_requests(6, tokens=20, seed=2)
    reference = make_engine(dtype=dtype).run(requests)
    engine = make_engine(dtype=dtype, proposer=oracle_of(reference), plan=DraftPlan.chain(3))
    rng, done, plans = random.Random(0), list[Generation](), set()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        engine.plan = rng.choice([OFF, DraftPlan.chain(1), DraftPlan.chain(5), TREES[1]])
        plans.add(engine.plan)
        done += engine.step()
        if rng.random() < 0.4:
            engine.preempt([f"r{rng.randrange(6)}", f"r{rng.randrange(6)}"])
    assert len(plans) == 3
    assert engine.stats().preempted > 1
    assert all_bits(done) == all_bits(reference)


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_a_weight_update_under_drafts(policy: KVPolicy) -> None:
    first, second = make_decoder(), make_decoder(1)
    requests = [make_request(f"u{i}", max_tokens=24, ignore_eos=True) for i in range(4)]

    def run(at: dict[str, int], proposer: LyingOracle | None) -> dict[str, Generation]:
        """Each request alone, updated where `at` says."""
        done = {}
        for request in requests:
            engine = make_engine(make_decoder(), proposer=proposer, plan=plan_of(proposer))
            engine.add(request)
            name = request.request_id
            while len(engine._scheduler.all()[0].token_ids) < at[name]:
                engine.step()
            at[name] = len(engine._scheduler.all()[0].token_ids)
            engine.update_weights(update_from(second, 1, kv_policy=policy))
            (done[name],) = drain(engine)
        return done

    def plan_of(proposer: LyingOracle | None) -> DraftPlan:
        return OFF if proposer is None else DraftPlan.chain(3)

    at = {request.request_id: 5 + 3 * i for i, request in enumerate(requests)}
    # Knows what the old weights would say; under new ones that is wrong, which is no error.
    plain = make_engine(first).run(requests)
    speculative = run(at, oracle_of(plain, LyingOracle))
    reference = run(at, None)
    assert all_bits(list(speculative.values())) == all_bits(list(reference.values()))
    for name, generation in speculative.items():
        assert generation.spans == reference[name].spans
        assert len(generation.spans) == 2


def test_memory_goes_to_requests_before_drafts() -> None:
    slot = 2 * 2 * 2 * 16 * 4
    requests = [make_request(f"m{i}", (3,) * 20, max_tokens=40, ignore_eos=True) for i in range(4)]
    reference = make_engine().run(requests)
    engine = make_engine(
        proposer=oracle_of(reference), plan=DraftPlan.chain(7), kv_budget_bytes=4 * 64 * slot
    )
    done = engine.run(requests)
    assert all_bits(done) == all_bits(reference)
    assert engine.stats().preempted == 0
    assert engine.stats().accepted_tokens > 0


def test_long_contexts_and_the_last_position(dtype: torch.dtype) -> None:
    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    lengths = (120, 500, 1015) if dtype == torch.float32 else (505,)
    rng = random.Random(6)
    for length in lengths:
        decoder = make_decoder(max_position_embeddings=length + 20, **sizes)
        request = make_request("long", random_prompt(rng, length), max_tokens=20, ignore_eos=True)
        settings: dict[str, Any] = {"max_model_len": length + 20}
        (reference,) = make_engine(decoder, dtype, **settings).run([request])
        engine = make_engine(
            decoder, dtype, proposer=oracle_of([reference]), plan=DraftPlan.chain(6), **settings
        )
        assert bits(engine.run([request])[0]) == bits(reference)


def test_history_drafts_what_a_greedy_policy_repeats() -> None:
    requests = [make_request(f"h{i}", (3, 4, 5, 6), temperature=0.0, max_tokens=60) for i in (0, 1)]
    reference = [make_engine().run([request])[0] for request in requests]
    engine = make_engine(proposer=HistoryProposer(), plan=DraftPlan.chain(5))
    done = [engine.run([request])[0] for request in requests]
    assert all_bits(done) == all_bits(reference)
    # The second request finds the first one's response.
    assert engine.stats().accepted_tokens > 40


def test_staggered_samples_run_one_after_the_other() -> None:
    prompts = [(3, 4, 5), (6, 7, 8)]
    requests = [
        make_request(f"{p}/{i}", prompt, max_tokens=9, ignore_eos=True)
        for p, prompt in enumerate(prompts)
        for i in range(3)
    ]
    reference = make_engine().run(requests)

    def together(**settings: Any) -> set[tuple[str, ...]]:
        engine = make_engine(proposer=HistoryProposer(), plan=DraftPlan.chain(2), **settings)
        seen, done = set(), list[Generation]()
        for request in requests:
            engine.add(request)
        while engine.has_work():
            done += engine.step()
            running = engine._scheduler.running
            seen.add(tuple(sorted(r.request_id.split("/")[0] for r in running)))
        assert all_bits(done) == all_bits(reference)
        return seen

    assert ("0", "0") in together(max_num_seqs=2)
    # One of each prompt, until only one prompt is left.
    assert ("0", "1") in together(max_num_seqs=2, stagger_samples=True)
    assert not {("0", "0"), ("1", "1")} & together(max_num_seqs=2, stagger_samples=True)


def test_a_plan_needs_a_proposer() -> None:
    with pytest.raises(ConfigError, match="draft plan 3_1_4 needs a proposer"):
        make_engine(plan=DraftPlan.chain(3))


def test_speculation_can_be_left_out_for_a_while() -> None:
    requests = mixed_requests(6, tokens=20)
    reference = make_engine(shared_decoder()).run(requests)
    engine = make_engine(proposer=oracle_of(reference, LyingOracle), plan=DraftPlan.chain(3))
    drafted = []
    for on in (True, False, True):
        engine.speculate(on)
        before = engine.stats()
        assert all_bits(engine.run(requests)) == all_bits(reference)
        drafted.append(engine.stats().since(before).draft_tokens)
    assert min(drafted[0], drafted[2]) > 0
    assert drafted[1] == 0
    engine.add(requests[0])
    engine.step()
    with pytest.raises(EngineError, match="requests are running; let them end, or abort them"):
        engine.speculate(False)
    with pytest.raises(EngineError, match="was made without a proposer of drafts"):
        make_engine().speculate(True)


class Choosy:
    """`StrategySelector` that drafts at random, but not for the first `unseen` steps of rollouts,
    and keeps what it is told."""

    def __init__(self, *unseen: int) -> None:
        self._rng = random.Random(0)
        self._unseen = list(unseen)
        self.begun: list[int] = []
        self.asked: list[DraftPlan] = []
        self.told: list[DraftPlan] = []
        self.changes: list[bool] = []

    def begin_rollout(self, requests: int) -> int:
        self.begun.append(requests)
        return self._unseen[len(self.begun) - 1]

    def select(self, running: int) -> DraftPlan:
        self.asked.append(self._rng.choice([OFF, DraftPlan.chain(2)]))
        return self.asked[-1]

    def record(self, step: StepRecord) -> None:
        self.told.append(step.plan)

    def changed(self, *, drafter: bool = False) -> None:
        self.changes.append(drafter)


def any_head() -> DraftHead:
    head = DraftHead(shared_decoder().config)
    head.init_weights(1)
    return head


@pytest.mark.parametrize("who", ["history", "union"])
def test_rollouts_that_nobody_drafts_for(who: str) -> None:
    requests = mixed_requests(12, tokens=40)
    reference = make_engine(shared_decoder()).run(requests)
    history = HistoryProposer()
    union = UnionProposer(EagleProposer(any_head(), dtype=torch.float32), history)
    selector = Choosy(10**9, 0, 10, 10**9, 0)
    engine = make_engine(
        proposer=history if who == "history" else union, selector=selector, max_num_seqs=5
    )
    known, steps = 0, []
    for _ in range(5):
        before = engine.stats()
        assert all_bits(engine.run(requests)) == all_bits(reference)
        new = engine.stats().since(before)
        steps.append((new.recess_steps, new.recess_steps == new.decode_steps, new.draft_tokens > 0))
        # What was written is remembered all the same, but for what was there when drafts began in
        # the midst of a rollout.
        assert not history._running
        assert history.kept_tokens > known
        known = history.kept_tokens
    assert [recess for recess, *_ in steps[1:3]] == [0, 10]
    assert [whole for _, whole, _ in steps] == [True, False, False, True, False]
    assert [drafted for *_, drafted in steps] == [False, True, True, False, True]
    assert selector.begun == [5] * 5
    assert len(selector.asked) == engine.stats().decode_steps - engine.stats().recess_steps
    assert selector.told == selector.asked


def test_much_happens_while_nobody_drafts() -> None:
    requests = mixed_requests(8, tokens=40)
    reference = {g.request_id: bits(g) for g in make_engine(shared_decoder()).run(requests)}
    history, selector = HistoryProposer(), Choosy(10**9, 0)
    engine = make_engine(
        proposer=UnionProposer(EagleProposer(any_head(), dtype=torch.float32), history),
        selector=selector,
        max_num_seqs=5,
    )
    for request in requests:
        engine.add(request)
    done = engine.step() + engine.step()
    engine.preempt([requests[1].request_id, requests[3].request_id])
    done += engine.step()
    engine.update_weights(update_from(shared_decoder(), 1, kv_policy=KVPolicy.RECOMPUTE))
    done += engine.step()
    kept = history.kept_tokens
    stopped = engine.abort([requests[0].request_id])
    assert history.kept_tokens >= kept + len(stopped[0].token_ids)
    done += drain(engine)
    assert [bits(g) for g in done] == [reference[g.request_id] for g in done]
    assert len(done) == 7
    # Each once, however often it was sent back, after up to sixteen tokens of its prompt.
    prompts = {request.request_id: request.prompt_ids for request in requests}
    assert history.kept_tokens == sum(
        len(g.token_ids) + min(16, len(prompts[g.request_id])) for g in done + stopped
    )
    assert selector.asked == []
    assert engine.stats().recess_steps == engine.stats().decode_steps
    # Left out altogether, it is not asked.
    engine.speculate(False)
    engine.run(requests)
    assert (selector.begun, selector.asked) == ([5], [])
    assert engine.stats().recess_steps < engine.stats().decode_steps
    engine.speculate(True)
    engine.run(requests)
    assert len(selector.begun) == 2
    assert len(selector.asked) > 0


def test_a_rollout_begins_once_however_long_its_prompt() -> None:
    selector = Choosy(0)
    engine = make_engine(proposer=HistoryProposer(), selector=selector, max_prefill_tokens=16)
    prompt = random_prompt(random.Random(0), 40)
    engine.run([make_request("long", prompt=prompt, max_tokens=4)])
    assert selector.begun == [1]


def test_a_selector_is_told_what_has_changed() -> None:
    head, selector = any_head(), Choosy()
    engine = make_engine(proposer=EagleProposer(head, dtype=torch.float32), selector=selector)
    engine.update_weights(update_from(shared_decoder(), 1))
    weights = [(name, weight.detach().clone()) for name, weight in head.named_parameters()]
    engine.update_drafter(WeightUpdate(version=1, buckets=[weights], kind=UpdateKind.DRAFT))
    assert selector.changes == [False, True]


@pytest.mark.parametrize("plan", [DraftPlan.chain(3), DraftPlan(4, 3, 12)], ids=str)
def test_a_selector_is_told_how_far_chains_would_have_come(plan: DraftPlan) -> None:
    class Told(PredefinedSelector):
        steps: ClassVar[list[StepRecord]] = []

        def record(self, step: StepRecord) -> None:
            self.steps.append(step)

    requests = mixed_requests(8, tokens=30)
    reference = make_engine(shared_decoder()).run(requests)
    selector = Told(plan)
    engine = make_engine(proposer=oracle_of(reference), selector=selector)
    engine.run(requests)
    told = [step for step in selector.steps if step.drafted]
    selector.steps.clear()
    if plan.topk == 1:
        assert not any(step.straight for step in told)
        return
    lines = [zip(s.straight, s.drafted, s.accepted, strict=True) for s in told]
    pairs = [pair for line in lines for pair in line]
    assert all(right <= drafts <= all_of_them for (drafts, right), all_of_them, _ in pairs)
    assert sum(right for (_, right), *_ in pairs) > 0
    # Whoever came further went by a sibling.
    further = [accepted > right for (_, right), _, accepted in pairs]
    assert 0 < sum(further) <= engine.stats().sibling_tokens


def test_after_a_recess_requests_are_seen_from_their_beginning() -> None:
    class Watched(HistoryProposer):
        known: ClassVar[list[bool]] = []

        def begin(
            self,
            request_id: str,
            prompt: Sequence[int],
            context: Sequence[int],
            features_TD: torch.Tensor | None = None,
        ) -> None:
            self.known.append(features_TD is not None)
            super().begin(request_id, prompt, context)

    proposer = Watched()
    engine = make_engine(proposer=proposer, selector=Choosy(10**9, 0, 5), max_num_seqs=5)
    requests = [make_request(f"r{i}", max_tokens=30, ignore_eos=True) for i in range(8)]
    engine.run(requests)
    assert proposer.known == []
    engine.run(requests)
    assert proposer.known == [True] * 8
    engine.run(requests)
    # Those that were there after five steps, and the others.
    assert proposer.known[8:] == [False] * 5 + [True] * 3


def test_accepting_without_comparing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_module, "accepted_path", lambda tokens, parents, chosen: list(range(len(tokens)))
    )
    requests = mixed_requests(6, tokens=20)
    reference = make_engine(shared_decoder()).run(requests)
    engine = make_engine(proposer=oracle_of(reference, LyingOracle), plan=DraftPlan.chain(3))
    assert all_bits(engine.run(requests)) != all_bits(reference)


def test_drafted_tokens_depths_and_plans_are_counted() -> None:
    requests = [make_request(f"r{i}", max_tokens=41, ignore_eos=True) for i in range(3)]
    reference = make_engine().run(requests)
    engine = make_engine(
        proposer=oracle_of(reference, lies=0.0, ragged=False), plan=DraftPlan.chain(4)
    )
    done = engine.run(requests)
    # The prefill's token, then in eight steps four drafts and one that was not drafted.
    drafted = [i for i in range(1, 41) if i % 5]
    assert [g.drafted for g in done] == [drafted] * 3
    stats = engine.stats()
    assert stats.offered_depths == stats.accepted_depths == (24,) * 4 + (0,) * 12
    assert stats.plan_seconds.keys() == {(1, "4_1_5")}
    assert stats.plan_seconds[1, "4_1_5"] == pytest.approx(stats.draft_seconds)
    assert 0 < stats.propose_seconds < stats.draft_seconds
    plain = make_engine()
    assert [g.drafted for g in plain.run(requests)] == [[]] * 3
    assert (plain.stats().plan_seconds, plain.stats().offered_depths) == ({}, (0,) * 16)


def test_of_drafts_that_are_partly_right_depths_tell_how_far() -> None:
    requests = [make_request("r", max_tokens=12, ignore_eos=True)]
    (known,) = make_engine().run(requests)
    oracle = oracle_of([known], lies=0.0, ragged=False)
    # From the third token on it knows something else.
    oracle._known = {"r": [*known.token_ids[:3], *[known.token_ids[3] ^ 1] * 9]}
    engine = make_engine(proposer=oracle, plan=DraftPlan.chain(4))
    oracle.observe = lambda *_: None  # type: ignore[method-assign]
    engine.add(requests[0])
    engine.step()
    stats = engine.stats()
    assert stats.offered_depths[:5] == (1, 1, 1, 1, 0)
    assert stats.accepted_depths[:4] == (1, 1, 0, 0)


def test_counters_of_plans_are_subtracted_as_others_are() -> None:
    before = EngineStats(plan_seconds={(0, "off"): 1.0}, offered_depths=(1,) * 16)
    now = EngineStats(plan_seconds={(0, "off"): 1.0, (2, "4_1_5"): 3.0}, offered_depths=(3,) * 16)
    new = now.since(before)
    assert (new.plan_seconds, new.offered_depths) == ({(2, "4_1_5"): 3.0}, (2,) * 16)
