"""Speculative decoding in the engine: it gives the bits of plain decoding, and the selector, the
proposer and the counters receive the right values."""

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
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
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
    """A `LyingOracle` that checks that generated tokens equal the known responses."""

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
    """A proposer that knows these responses; a fraction `lies` of its drafts is wrong."""
    responses = {generation.request_id: generation.token_ids for generation in known}
    return kind(responses, vocab_size=VOCAB, lies=lies, ragged=ragged)


def speculated(
    requests: Sequence[GenerateRequest],
    reference: Sequence[Generation],
    plan: DraftPlan,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[Generation]:
    """Generate with drafts, and check the counters."""
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
def test_drafts_do_not_change_bits(dtype: torch.dtype, plan: DraftPlan) -> None:
    count, tokens = (14, 40) if dtype == torch.float32 else (6, 12)
    requests = mixed_requests(count, tokens=tokens)
    reference = make_engine(dtype=dtype).run(requests)
    for limit in (1, 7, 64) if dtype == torch.float32 else (7,):
        done = speculated(requests, reference, plan, dtype, max_num_seqs=limit)
        assert all_bits(done) == all_bits(reference)
        assert [g.stop_reason for g in done] == [g.stop_reason for g in reference]


def test_accepted_drafts_save_steps() -> None:
    requests = [make_request(f"r{i}", max_tokens=41, ignore_eos=True) for i in range(3)]
    plain = make_engine()
    reference = plain.run(requests)
    oracle = oracle_of(reference, lies=0.0, ragged=False)
    engine = make_engine(proposer=oracle, plan=DraftPlan.chain(4))
    assert all_bits(engine.run(requests)) == all_bits(reference)
    # The prefill samples one token. Each step then gives four drafts and a bonus token.
    assert plain.stats().decode_steps == 40
    assert engine.stats().decode_steps == 8
    assert engine.stats().accepted_tokens == 3 * 32


@pytest.mark.parametrize("plan", [DraftPlan.chain(6), DraftPlan(6, 2, 14)], ids=str)
def test_a_response_that_ends_inside_accepted_drafts_is_cut(plan: DraftPlan) -> None:
    decoder = make_decoder(eos=EOS)
    rng = random.Random(3)
    requests = [
        make_request(f"e{i}", random_prompt(rng, 5), max_tokens=60, stop=stop, hidden=True)
        for i, stop in enumerate([(), (), (), ("ab", "z"), ("q",), ("5", "m")])
    ]
    reference = make_engine(decoder).run(requests)
    oracle = oracle_of(reference, lies=0.05)
    # Drafts after the end of a response must be ignored.
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


def test_preemption_and_changing_plans_with_drafts_do_not_change_bits(dtype: torch.dtype) -> None:
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
def test_a_weight_update_with_drafts_gives_the_bits_of_plain_decoding(policy: KVPolicy) -> None:
    first, second = make_decoder(), make_decoder(1)
    requests = [make_request(f"u{i}", max_tokens=24, ignore_eos=True) for i in range(4)]

    def run(at: dict[str, int], proposer: LyingOracle | None) -> dict[str, Generation]:
        """Run each request alone, and update the weights when it has at least `at[id]` tokens.

        `at` is set to the number of tokens at the update.
        """
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
    # Its drafts are the responses of the old weights. With the new ones, most are rejected.
    plain = make_engine(first).run(requests)
    speculative = run(at, oracle_of(plain, LyingOracle))
    reference = run(at, None)
    assert all_bits(list(speculative.values())) == all_bits(list(reference.values()))
    for name, generation in speculative.items():
        assert generation.spans == reference[name].spans
        assert len(generation.spans) == 2


def test_drafts_are_left_out_rather_than_preempting_requests() -> None:
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


def test_drafts_up_to_the_last_position_do_not_change_bits(
    dtype: torch.dtype,
) -> None:
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


def test_history_drafts_of_a_repeated_greedy_response_are_accepted() -> None:
    requests = [make_request(f"h{i}", (3, 4, 5, 6), temperature=0.0, max_tokens=60) for i in (0, 1)]
    reference = [make_engine().run([request])[0] for request in requests]
    engine = make_engine(proposer=HistoryProposer(), plan=DraftPlan.chain(5))
    done = [engine.run([request])[0] for request in requests]
    assert all_bits(done) == all_bits(reference)
    # The drafts of the second request come from the response of the first one.
    assert engine.stats().accepted_tokens > 40


def test_staggered_samples_of_a_prompt_run_one_after_the_other() -> None:
    prompts = [(3, 4, 5), (6, 7, 8)]
    requests = [
        make_request(f"{p}/{i}", prompt, max_tokens=9, ignore_eos=True)
        for p, prompt in enumerate(prompts)
        for i in range(3)
    ]
    reference = make_engine().run(requests)

    def running_prompts(**settings: Any) -> set[tuple[str, ...]]:
        """The sets of prompts of the requests that ran at the same time."""
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

    assert ("0", "0") in running_prompts(max_num_seqs=2)
    # One sample of each prompt runs.
    assert ("0", "1") in running_prompts(max_num_seqs=2, stagger_samples=True)
    assert not {("0", "0"), ("1", "1")} & running_prompts(max_num_seqs=2, stagger_samples=True)


def test_a_plan_needs_a_proposer() -> None:
    with pytest.raises(ConfigError, match="draft plan 3_1_4 needs a proposer"):
        make_engine(plan=DraftPlan.chain(3))


def test_speculation_can_be_switched_off_and_on() -> None:
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
    with pytest.raises(EngineError, match="made without a draft proposer"):
        make_engine().speculate(True)


class RandomSelector:
    """A `StrategySelector` that chooses plans at random and stores its calls.

    Rollout i begins with `backoff_steps[i]` steps of backoff.
    """

    def __init__(self, *backoff_steps: int) -> None:
        self._rng = random.Random(0)
        self._backoff_steps = list(backoff_steps)
        self.rollouts: list[int] = []
        self.selected: list[DraftPlan] = []
        self.recorded: list[DraftPlan] = []
        self.changes: list[bool] = []

    def begin_rollout(self, requests: int) -> int:
        self.rollouts.append(requests)
        return self._backoff_steps[len(self.rollouts) - 1]

    def select(self, running: int) -> DraftPlan:
        self.selected.append(self._rng.choice([OFF, DraftPlan.chain(2)]))
        return self.selected[-1]

    def record(self, step: StepRecord) -> None:
        self.recorded.append(step.plan)

    def changed(self, *, drafter: bool = False) -> None:
        self.changes.append(drafter)


def any_head() -> DraftHead:
    """An untrained draft head."""
    head = DraftHead(shared_decoder().config)
    head.init_weights(1)
    return head


@pytest.mark.parametrize("strategy", ["history", "union"])
def test_rollouts_in_backoff_have_no_drafts_and_fill_the_history(strategy: str) -> None:
    requests = mixed_requests(12, tokens=40)
    reference = make_engine(shared_decoder()).run(requests)
    history = HistoryProposer()
    union = UnionProposer(EagleProposer(any_head(), dtype=torch.float32), history)
    selector = RandomSelector(10**9, 0, 10, 10**9, 0)
    engine = make_engine(
        proposer=history if strategy == "history" else union, selector=selector, max_num_seqs=5
    )
    known, steps = 0, []
    for _ in range(5):
        before = engine.stats()
        assert all_bits(engine.run(requests)) == all_bits(reference)
        new = engine.stats().since(before)
        steps.append((new.recess_steps, new.recess_steps == new.decode_steps, new.draft_tokens > 0))
        # The history also stores responses of rollouts in backoff. The exception is tokens from
        # before drafts began in the middle of a rollout.
        assert not history._running
        assert history.kept_tokens > known
        known = history.kept_tokens
    assert [backoff for backoff, *_ in steps[1:3]] == [0, 10]
    assert [whole for _, whole, _ in steps] == [True, False, False, True, False]
    assert [drafted for *_, drafted in steps] == [False, True, True, False, True]
    assert selector.rollouts == [5] * 5
    assert len(selector.selected) == engine.stats().decode_steps - engine.stats().recess_steps
    assert selector.recorded == selector.selected


def test_preemption_update_and_abort_during_backoff() -> None:
    requests = mixed_requests(8, tokens=40)
    reference = {g.request_id: bits(g) for g in make_engine(shared_decoder()).run(requests)}
    history, selector = HistoryProposer(), RandomSelector(10**9, 0)
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
    # Each response is stored once, even after preemption, with up to 16 tokens of its prompt.
    prompts = {request.request_id: request.prompt_ids for request in requests}
    assert history.kept_tokens == sum(
        len(g.token_ids) + min(16, len(prompts[g.request_id])) for g in done + stopped
    )
    assert selector.selected == []
    assert engine.stats().recess_steps == engine.stats().decode_steps
    # With speculation off, the selector is not called.
    engine.speculate(False)
    engine.run(requests)
    assert (selector.rollouts, selector.selected) == ([5], [])
    assert engine.stats().recess_steps < engine.stats().decode_steps
    engine.speculate(True)
    engine.run(requests)
    assert len(selector.rollouts) == 2
    assert len(selector.selected) > 0


def test_a_rollout_with_chunked_prefill_begins_once() -> None:
    selector = RandomSelector(0)
    engine = make_engine(proposer=HistoryProposer(), selector=selector, max_prefill_tokens=16)
    prompt = random_prompt(random.Random(0), 40)
    engine.run([make_request("long", prompt=prompt, max_tokens=4)])
    assert selector.rollouts == [1]


def test_the_selector_is_told_about_new_weights() -> None:
    head, selector = any_head(), RandomSelector()
    engine = make_engine(proposer=EagleProposer(head, dtype=torch.float32), selector=selector)
    engine.update_weights(update_from(shared_decoder(), 1))
    weights = [(name, weight.detach().clone()) for name, weight in head.named_parameters()]
    engine.update_drafter(WeightUpdate(version=1, buckets=[weights], kind=UpdateKind.DRAFT))
    assert selector.changes == [False, True]


class RecordingSelector(PredefinedSelector):
    """Keeps the step records."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__(plan)
        self.steps: list[StepRecord] = []

    def record(self, step: StepRecord) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("plan", [DraftPlan.chain(3), DraftPlan(4, 3, 12)], ids=str)
def test_step_records_of_trees_say_how_far_chains_would_have_come(plan: DraftPlan) -> None:
    requests = mixed_requests(8, tokens=30)
    reference = make_engine(shared_decoder()).run(requests)
    selector = RecordingSelector(plan)
    engine = make_engine(proposer=oracle_of(reference), selector=selector)
    engine.run(requests)
    steps = [step for step in selector.steps if step.drafted]
    if plan.topk == 1:
        assert not any(step.straight for step in steps)
        return
    rows = [row for s in steps for row in zip(s.straight, s.drafted, s.accepted, strict=True)]
    assert all(in_chain <= length <= drafted for (length, in_chain), drafted, _ in rows)
    assert sum(in_chain for (_, in_chain), *_ in rows) > 0
    # A longer path than the chain's contains a sibling.
    longer = [accepted > in_chain for (_, in_chain), _, accepted in rows]
    assert 0 < sum(longer) <= engine.stats().sibling_tokens


def test_step_records_compare_drafts_that_were_left_out() -> None:
    class LeavesOut(LyingOracle):
        def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
            chains = super().propose(batch, DraftPlan.chain(1))
            return [
                DraftTree(tree.tokens[:1], [-1], left_out=next(iter(tree.tokens[1:]), None))
                for tree in chains
            ]

    requests = mixed_requests(8, tokens=30)
    reference = make_engine(shared_decoder()).run(requests)
    selector = RecordingSelector(DraftPlan(4, 3, 12))
    proposer = oracle_of(reference, LeavesOut, lies=0.0, ragged=False)
    make_engine(proposer=proposer, selector=selector).run(requests)
    pairs = [pair for step in selector.steps for pair in step.straight]
    assert not any(step.drafted for step in selector.steps)
    # After its last known token a response has no next draft.
    assert {pair for pair in pairs if pair != (0, 0)} == {(1, 1)}
    assert len(pairs) > 100


def test_a_head_reports_drafts_that_were_left_out() -> None:
    class Strict(RecordingSelector):
        def min_acceptance(self, running: int) -> float:
            return 0.999

    selector = Strict(DraftPlan(4, 3, 12))
    head = EagleProposer(any_head(), dtype=torch.float32)
    make_engine(proposer=head, selector=selector).run(mixed_requests(8, tokens=30))
    lengths = [length for step in selector.steps for length, _ in step.straight]
    assert not any(step.drafted for step in selector.steps)
    assert sum(length == 1 for length in lengths) > len(lengths) / 2


def test_after_backoff_the_proposer_sees_all_running_requests() -> None:
    class WatchedHistory(HistoryProposer):
        with_features: ClassVar[list[bool]] = []

        def begin(
            self,
            request_id: str,
            prompt: Sequence[int],
            context: Sequence[int],
            features_TD: torch.Tensor | None = None,
        ) -> None:
            self.with_features.append(features_TD is not None)
            super().begin(request_id, prompt, context)

    proposer = WatchedHistory()
    engine = make_engine(proposer=proposer, selector=RandomSelector(10**9, 0, 5), max_num_seqs=5)
    requests = [make_request(f"r{i}", max_tokens=30, ignore_eos=True) for i in range(8)]
    engine.run(requests)
    assert proposer.with_features == []
    engine.run(requests)
    assert proposer.with_features == [True] * 8
    engine.run(requests)
    # Five requests ran when the backoff ended after five steps; three started later.
    assert proposer.with_features[8:] == [False] * 5 + [True] * 3


def test_accepting_all_drafts_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # The token of the prefill, then in each of 8 steps four drafts and a bonus token.
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


def test_depths_of_partly_accepted_drafts_are_counted() -> None:
    requests = [make_request("r", max_tokens=12, ignore_eos=True)]
    (known,) = make_engine().run(requests)
    oracle = oracle_of([known], lies=0.0, ragged=False)
    # It proposes other tokens from the fourth one on.
    oracle._known = {"r": [*known.token_ids[:3], *[known.token_ids[3] ^ 1] * 9]}
    engine = make_engine(proposer=oracle, plan=DraftPlan.chain(4))
    oracle.observe = lambda *_: None  # type: ignore[method-assign]
    engine.add(requests[0])
    engine.step()
    stats = engine.stats()
    assert stats.offered_depths[:5] == (1, 1, 1, 1, 0)
    assert stats.accepted_depths[:4] == (1, 1, 0, 0)


def test_stats_since_subtracts_counters_by_plan_and_depth() -> None:
    before = EngineStats(plan_seconds={(0, "off"): 1.0}, offered_depths=(1,) * 16)
    now = EngineStats(plan_seconds={(0, "off"): 1.0, (2, "4_1_5"): 3.0}, offered_depths=(3,) * 16)
    new = now.since(before)
    assert (new.plan_seconds, new.offered_depths) == ({(2, "4_1_5"): 3.0}, (2,) * 16)
