"""Tests of drafts by an EAGLE head: the drafts themselves, and that they are lossless."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.inference.speculation.report import ReportedSelector
from slipstream.inference.speculation.selector import PredefinedSelector
from slipstream.kernels import team
from slipstream.models import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.forward import DraftPass
from slipstream.types import Generation, UpdateKind, WeightUpdate
from tests.inference.helpers import (
    all_bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    shared_decoder,
    update_from,
)
from tests.inference.stand_in import trace


def new_head(decoder: Decoder, seed: int = 1) -> DraftHead:
    head = DraftHead(decoder.config)
    head.init_weights(seed)
    return head


class Recorder(EagleProposer):
    """Records its drafts."""

    drafted: list[tuple[str, int, list[int]]]
    """Request id, position, and draft tokens of each draft."""
    pending: dict[int, dict[str, list[int]]]
    """Pending tokens by request, at each `propose` call; keys are numbers of earlier drafts."""

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        self.pending[len(self.drafted)] = self.pending_tokens()
        trees = super().propose(batch, plan)
        for name, position, tree in zip(
            batch.request_ids, batch.positions_N.tolist(), trees, strict=True
        ):
            self.drafted.append((name, position, [*tree.tokens[1:]]))
        return trees

    def pending_tokens(self) -> dict[str, list[int]]:
        pending = self._pending.of(self._rows_of(self._order))
        if pending is None:
            return {}
        parts = np.split(pending.tokens_T, np.cumsum(pending.counts_N)[:-1])
        return {name: part.tolist() for name, part in zip(self._order, parts, strict=True)}


def recorder(decoder: Decoder) -> Recorder:
    made = Recorder(new_head(decoder), dtype=torch.float32)
    made.drafted, made.pending = [], {}
    return made


@pytest.mark.parametrize("prompt", [3, 140])
def test_drafts_equal_those_of_the_head_on_the_policys_features(prompt: int) -> None:
    """The longer prompts exceed one chunk of the head's prefill."""
    decoder = shared_decoder()
    proposer = recorder(decoder)
    with torch.no_grad():
        # The drafts of a newly initialized head depend on little but the last token.
        generator = torch.Generator().manual_seed(3)
        for parameter in proposer._head.parameters():
            parameter.normal_(std=0.3, generator=generator)
    proposer._packed = proposer._head.pack(torch.float32)
    requests = [
        make_request(
            f"d{i}",
            [3 + (j * j + i) % 40 for j in range(prompt + 3 * i)],
            temperature=0.0,
            max_tokens=14,
            ignore_eos=True,
        )
        for i in range(5)
    ]
    done = make_engine(proposer=proposer, plan=DraftPlan.chain(3)).run(requests)
    texts = {
        r.request_id: [*r.prompt_ids, *g.token_ids] for r, g in zip(requests, done, strict=True)
    }
    assert len(proposer.drafted) > 30
    with torch.no_grad():
        policy, head = decoder.pack(torch.float32), proposer._head.pack(torch.float32)
        for name, length, chain in proposer.drafted:
            tokens = list(texts[name][:length])
            ids = torch.tensor([tokens])
            features = policy.forward(ids, torch.arange(length)[None]).final[:, :-1]
            for draft in chain:
                given = torch.tensor([tokens[1:]])
                out = next(head.unroll(given, features, policy.embedding, 1))
                assert int(policy.lm_head(out[0, -1:]).argmax()) == draft
                features = torch.cat([features, out[:, -1:]], dim=1)
                tokens.append(draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "SHARED_FROM", 1)
    drafted, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            proposer = Recorder(new_head(shared_decoder()), dtype=dtype)
            proposer.drafted, proposer.pending = [], {}
            engine = make_engine(dtype=dtype, proposer=proposer, plan=DraftPlan.chain(4))
            # Only requests without top-k, top-p and min-p, because the kernel drafts for these.
            for request in [r for i, r in enumerate(mixed_requests(12)) if i % 6 < 3]:
                engine.add(request)
            drain(engine)
            drafted.append(proposer.drafted)
    finally:
        torch.set_num_threads(before)
    assert len(drafted[0]) > 20
    assert drafted[0] == drafted[1] == drafted[2]


@pytest.mark.parametrize("drafts", [1, 4])
def test_drafts_do_not_change_the_generated_tokens(drafts: int) -> None:
    requests = mixed_requests(12, tokens=30)
    reference = all_bits(make_engine().run(requests))
    for limit in (1, 5, 64):
        proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
        engine = make_engine(proposer=proposer, plan=DraftPlan.chain(drafts), max_num_seqs=limit)
        assert all_bits(engine.run(requests)) == reference
        stats = engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_drafts_are_lossless_with_preemption_aborts_and_changing_plans() -> None:
    requests = mixed_requests(7, tokens=24, seed=2)
    reference = all_bits(make_engine().run(requests))
    proposer = recorder(shared_decoder())
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(3))
    rng, done = random.Random(0), list[Generation]()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        engine.plan = rng.choice([OFF, DraftPlan.chain(1), DraftPlan.chain(4)])
        done += engine.step()
        if rng.random() < 0.4:
            engine.preempt([f"r{rng.randrange(7)}", f"r{rng.randrange(7)}"])
        if "r5" not in {g.request_id for g in done} and rng.random() < 0.1:
            done += engine.abort(["r5"])
    assert engine.stats().preempted > 2
    got = all_bits(done)
    tokens, full, sampling = got.pop("r5")
    expected = reference.pop("r5")
    assert (tokens, full, sampling) == tuple(part[: len(tokens)] for part in expected)
    assert got == reference
    assert proposer._order == []


def test_pending_features_are_processed_once_after_a_preemption() -> None:
    decoder = shared_decoder()
    # The second request keeps running, so the pending features of the batch are not dropped.
    requests = [
        make_request(name, range(3, 12 + i), temperature=0.0, max_tokens=24, ignore_eos=True)
        for i, name in enumerate(("one", "other"))
    ]
    found = []
    for preempted in (False, True):
        proposer = recorder(decoder)
        engine = make_engine(proposer=proposer, plan=OFF)
        for request in requests:
            engine.add(request)
        for _ in range(6):
            engine.step()
        if preempted:
            engine.preempt(["one"])
        engine.plan = DraftPlan.chain(3)
        while engine.has_work():
            engine.step()
        assert engine.stats().preempted == preempted
        found.append({n: chain for name, n, chain in proposer.drafted if name == "one"})
        # One pending token for each context token except the first.
        (first, *_) = found[-1]
        assert len(proposer.pending[0]["one"]) == first - 1
    usual, again = found
    # With a preemption there is one step less before the first draft, because a prefill yields a
    # token.
    common = usual.keys() & again.keys()
    assert len(common) > 3
    assert {n: usual[n] for n in common} == {n: again[n] for n in common}


def test_features_are_stored_contiguously_and_checked() -> None:
    decoder = shared_decoder()
    proposer, size = recorder(decoder), decoder.config.hidden_size
    with pytest.raises(EngineError, match=r"features have width 32 and torch.bfloat16, but"):
        proposer.begin("a", [3, 4], [3, 4, 5], torch.zeros(2, size, dtype=torch.bfloat16))
    with pytest.raises(EngineError, match=r"features have width 96 .* width 32 and torch.float32"):
        proposer.begin("a", [3, 4], [3, 4, 5], torch.zeros(2, 3 * size))
    features = torch.arange(2.0 * size).view(size, 2).T
    proposer.begin("b", [3, 4], [3, 4, 5], features)
    kept = proposer._rows["b"].features_TD
    assert kept is not None
    assert kept.is_contiguous()
    torch.testing.assert_close(kept, features, rtol=0, atol=0)


def test_pending_features_of_steps_are_limited() -> None:
    requests = [make_request(f"w{i}", max_tokens=30, ignore_eos=True) for i in range(3)]
    reference = all_bits(make_engine().run(requests))
    # Room for two steps with three features of width 32.
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32, pending_bytes=768)
    engine = make_engine(proposer=proposer, plan=OFF)
    for request in requests:
        engine.add(request)
    done = [g for _ in range(9) for g in engine.step()]
    assert len(proposer._pending) == 2
    assert proposer._pending.nbytes == 768
    engine.plan = DraftPlan.chain(3)
    while engine.has_work():
        done += engine.step()
    assert all_bits(done) == reference
    assert engine.stats().draft_tokens > 0


def test_initial_features_of_requests_are_limited() -> None:
    decoder = shared_decoder()
    size = decoder.config.hidden_size
    features = torch.arange(20.0 * size).view(20, size)
    proposer = EagleProposer(
        new_head(decoder), dtype=torch.float32, pending_bytes=25 * size * features.element_size()
    )
    context = list(range(3, 24))
    for name in "abc":
        proposer.begin(name, context[:-1], context, features)
    whole, part, none = (proposer._rows[name] for name in "abc")
    assert whole.features_TD is features
    assert list(whole.tokens) == context[1:]
    assert torch.equal(part.features_TD, features[-5:])  # type: ignore[arg-type]
    assert list(part.tokens) == context[-5:]
    assert (none.features_TD, none.tokens) == (None, ())
    proposer.end("a")
    proposer.begin("d", context[:-1], context, features)
    assert proposer._rows["d"].features_TD is features


def test_nothing_is_drafted_beyond_the_kv_budget() -> None:
    requests = [make_request(f"b{i}", max_tokens=20, ignore_eos=True) for i in range(3)]
    reference = all_bits(make_engine().run(requests))
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32, kv_budget_bytes=1)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(3))
    assert all_bits(engine.run(requests)) == reference
    assert engine.stats().draft_tokens == 0


def test_rows_that_the_engine_does_not_have_are_an_error() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(2))
    engine.add(make_request("one", max_tokens=9, ignore_eos=True))
    engine.step()
    proposer.begin("unknown", (3,), (3,), None)
    with pytest.raises(EngineError, match="do not match the draft head's rows"):
        engine.step()


def test_rows_in_another_order_are_an_error() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(2))
    for name in ("one", "two"):
        engine.add(make_request(name, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    features = torch.zeros(2, 1, shared_decoder().config.hidden_size)
    with pytest.raises(EngineError, match="do not match the draft head's rows"):
        proposer.observe(["two", "one"], [(3,), (3,)], features)


def head_update(head: DraftHead, **changed: torch.Tensor) -> WeightUpdate:
    tensors = {name: t.detach().clone() for name, t in head.state_dict().items()} | changed
    return WeightUpdate(version=3, buckets=[list(tensors.items())], kind=UpdateKind.DRAFT)


def test_drafts_after_an_update_come_from_the_new_head() -> None:
    decoder, new = shared_decoder(), new_head(shared_decoder(), seed=2)
    requests = mixed_requests(6, tokens=30, seed=4)
    reference = all_bits(make_engine().run(requests))
    with torch.no_grad():
        # Larger weights, so that each of them affects the drafts.
        for parameter in new.layers.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    updated = recorder(decoder)
    engine = make_engine(proposer=updated, plan=DraftPlan.chain(3))
    for request in requests:
        engine.add(request)
    done = engine.step() + engine.step() + engine.step()
    at = len(updated.drafted)
    engine.update_drafter(head_update(new))
    while engine.has_work():
        done += engine.step()
    assert all_bits(done) == reference
    # Drafts continue at once. They are those of the new head on the features since the update.
    assert engine.stats().draft_tokens > 0
    texts = {r.request_id: [*r.prompt_ids, *reference[r.request_id][0]] for r in requests}
    # Request r1 is greedy.
    later = [(n, chain) for name, n, chain in updated.drafted[at:] if name == "r1" and chain]
    first = later[0][0] - len(updated.pending[at]["r1"])
    assert first > 1
    assert len(later) > 3
    with torch.no_grad():
        policy, head = decoder.pack(torch.float32), new.pack(torch.float32)
        for length, chain in later:
            tokens = texts["r1"][:length]
            ids = torch.tensor([tokens])
            known = policy.forward(ids, torch.arange(length)[None]).final[:, first - 1 : -1]
            given = torch.tensor([tokens[first:]])
            out = next(head.unroll(given, known, policy.embedding, 1))
            assert int(policy.lm_head(out[0, -1:]).argmax()) == chain[0]


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (r"fc\.weight has NaN", {"fc.weight": torch.full((32, 64), float("nan"))}),
        (
            r"fc\.weight has shape \(32, 32\), expected \(32, 64\)",
            {"fc.weight": torch.ones(32, 32)},
        ),
        (r"tensor bias is not part of this model", {"bias": torch.ones(3)}),
    ],
)
def test_a_bad_draft_update_changes_nothing(message: str, changed: dict[str, torch.Tensor]) -> None:
    requests = mixed_requests(4, tokens=20)
    plain, refused = recorder(shared_decoder()), recorder(shared_decoder())
    reference = make_engine(proposer=plain, plan=DraftPlan.chain(2)).run(requests)
    engine = make_engine(proposer=refused, plan=DraftPlan.chain(2))
    for request in requests:
        engine.add(request)
    done = engine.step()
    update = head_update(new_head(shared_decoder(), seed=2), **changed)
    with pytest.raises(
        EngineError, match=f"version 3 refused, the weights in use stay: .*{message}"
    ):
        engine.update_drafter(update)
    missing = WeightUpdate(version=4, buckets=[[]], kind=UpdateKind.DRAFT)
    with pytest.raises(EngineError, match=r"version 4 refused.*tensor fc\.weight is missing"):
        engine.update_drafter(missing)
    while engine.has_work():
        done += engine.step()
    assert all_bits(done) == all_bits(reference)
    assert refused.drafted == plain.drafted


def test_draft_updates_need_a_draft_head_and_draft_weights() -> None:
    update = head_update(new_head(shared_decoder()))
    for engine in (make_engine(), make_engine(proposer=HistoryProposer())):
        with pytest.raises(EngineError, match="no draft head to update to 3"):
            engine.update_drafter(update)
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    with pytest.raises(EngineError, match="takes draft weights, got full"):
        make_engine(proposer=proposer).update_drafter(update_from(shared_decoder(), 3))


def test_the_embedded_engine_updates_its_draft_head() -> None:
    decoder, new = shared_decoder(), new_head(shared_decoder(), seed=2)
    proposer = EagleProposer(new_head(decoder), dtype=torch.float32)
    settings = EngineSettings(max_model_len=96, dtype=torch.float32)
    engine = EmbeddedEngine(decoder, settings, proposer=proposer, plan=DraftPlan.chain(2))

    async def run() -> list[list[int]]:
        first = await engine.generate(make_request("a", max_tokens=20))
        await engine.update_drafter(head_update(new))
        with pytest.raises(EngineError, match="is missing"):
            await engine.update_drafter(
                WeightUpdate(version=4, buckets=[[]], kind=UpdateKind.DRAFT)
            )
        second = await engine.generate(make_request("a", max_tokens=20))
        return [first.token_ids, second.token_ids]

    first, second = anyio.run(run)
    engine.close()
    assert first == second
    assert torch.equal(proposer._head.fc.weight, new.fc.weight)


def test_an_updated_head_keeps_its_dtype(dtype: torch.dtype) -> None:
    decoder, new = shared_decoder(), new_head(shared_decoder(), seed=2)
    request = make_request("a", [3, 4, 5], max_tokens=40, ignore_eos=True)
    reference = all_bits(make_engine(decoder, dtype).run([request]))
    proposer = EagleProposer(new_head(decoder), dtype=dtype)
    engine = make_engine(decoder, dtype, proposer=proposer, plan=DraftPlan.chain(2))
    engine.add(request)
    done = engine.step() + engine.step()
    before = engine.stats().draft_tokens
    engine.update_drafter(head_update(new))
    assert all_bits(done + drain(engine)) == reference
    assert engine.stats().draft_tokens > before
    assert proposer._packed.fc.weight.dtype == dtype


def test_a_head_with_another_dtype_than_the_policy_is_an_error() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.bfloat16)
    engine = make_engine(shared_decoder(), proposer=proposer, plan=DraftPlan.chain(2))
    engine.add(make_request("a", [3, 4, 5], max_tokens=8))
    with pytest.raises(EngineError, match=r"computes in torch.float32, but the draft head in torc"):
        drain(engine)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("plan", ["4_1_5", "3_2_6"])
def test_captured_drafting_gives_the_same_drafts(plan: str) -> None:
    requests = [make_request(f"r{i}", [3, 4, 5 + i], max_tokens=60) for i in range(3)]
    found = []
    for record in (None, trace):
        head = new_head(shared_decoder())
        proposer = EagleProposer(head, dtype=torch.float32, record=record)
        engine = make_engine(proposer=proposer, plan=DraftPlan.parse(plan))
        done = all_bits(engine.run(requests))
        stats = engine.stats()
        found.append((done, stats.draft_tokens, stats.accepted_tokens))
        graphs = proposer._graphs
        assert (graphs is None) == (record is None)
        if graphs is not None:
            assert graphs.replayed > 8
    assert found[0] == found[1]
    assert found[0][2] > 0


@pytest.mark.usefixtures("without_kernels")
def test_captured_drafting_uses_updated_weights() -> None:
    found = []
    for record in (None, trace):
        proposer = Recorder(
            new_head(shared_decoder()), dtype=torch.float32, record=record, free_cache=False
        )
        proposer.drafted, proposer.pending = [], {}
        engine = make_engine(
            proposer=proposer, plan=DraftPlan.parse("3_1_4"), free_cache_engine=False
        )
        for name, seed in (("a", 5), ("b", 6), ("a", 5)):
            # Larger weights, so that drafts differ.
            other = new_head(shared_decoder(), seed=seed)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(8 if parameter.ndim == 2 else 1)
            engine.update_drafter(head_update(other))
            engine.run([make_request(name, [3, 4, 5], max_tokens=60)])
        found.append(proposer.drafted)
    assert found[0] == found[1]
    by_head = [[tokens for name, _, tokens in found[0] if name == wanted] for wanted in "ab"]
    assert by_head[0][:5] != by_head[1][:5]
    graphs = proposer._graphs
    assert graphs is not None
    assert graphs.replayed > 8


@pytest.mark.parametrize(
    ("plan", "by_kernels"), [("3_1_4", True), ("3_1_4", False), ("3_2_6", False)]
)
def test_drafting_stays_within_the_kv_cache_of_the_head(
    plan: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rejected drafts need no room. With truncated sampling, the path of CPU kernels also drafts one
    # token per forward pass.
    if not by_kernels:
        monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: False)
    proposer = EagleProposer(new_head(make_decoder()), dtype=torch.float32)
    engine = make_engine(make_decoder(), proposer=proposer, plan=DraftPlan.parse(plan))
    reached: list[int] = []
    columns = DraftPass.__init__

    def checked(self: DraftPass, *given: Any) -> None:
        *_, kv, slots, num_keys = given
        store = proposer._store
        assert isinstance(store, BlockStore) == by_kernels
        room = len(store._rows[0]) * kv.block if isinstance(store, BlockStore) else kv.shape[3]
        reached.append(room - int(slots.max()) - 1)
        assert min(reached[-1], room - num_keys) >= 0
        columns(self, *given)

    monkeypatch.setattr(DraftPass, "__init__", checked)
    engine.run([make_request("a", [3, 4, 5], max_tokens=300, top_p=0.9)])
    # The last slots are nearly reached; the levels of a tree leave a few free.
    assert min(reached) < 8


def with_tokens(tokens: list[int], seed: int = 1) -> DraftHead:
    head = DraftHead(shared_decoder().config, tokens)
    head.init_weights(seed)
    return head


def drafted_tokens(proposer: Recorder, since: int = 0) -> set[int]:
    return {token for _, _, chain in proposer.drafted[since:] for token in chain}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("plan", ["3_1_4", "3_2_6"])
@pytest.mark.parametrize("fewer", [0, 7])
def test_a_draft_vocabulary_is_renewed_while_requests_run(
    kernels: bool, plan: str, fewer: int, request: pytest.FixtureRequest
) -> None:
    if not kernels:
        request.getfixturevalue("without_kernels")
    vocab_size = shared_decoder().config.vocab_size
    even, odd = [*range(0, vocab_size, 2)], [*range(1, vocab_size, 2)]
    requests = mixed_requests(6, tokens=30, seed=4)
    reference = all_bits(make_engine().run(requests))
    proposer = Recorder(with_tokens(even), dtype=torch.float32)
    proposer.drafted, proposer.pending = [], {}
    engine = make_engine(proposer=proposer, plan=DraftPlan.parse(plan))
    for each in requests:
        engine.add(each)
    done = [one for _ in range(4) for one in engine.step()]
    at = len(proposer.drafted)
    assert drafted_tokens(proposer) <= set(even)
    odd = odd[: len(even) - fewer]
    engine.update_drafter(head_update(with_tokens(odd)))
    done += drain(engine)
    assert all_bits(done) == reference
    assert 0 < len(drafted_tokens(proposer, at)) <= len(odd)
    assert drafted_tokens(proposer, at) <= set(odd)
    assert proposer._packed.tokens is not None
    assert proposer._packed.tokens.tolist() == odd


@pytest.mark.usefixtures("without_kernels")
def test_captured_drafting_follows_the_draft_vocabulary() -> None:
    vocab_size, found = shared_decoder().config.vocab_size, []
    for record in (None, trace):
        proposer = Recorder(
            with_tokens([*range(0, vocab_size, 2)]),
            dtype=torch.float32,
            record=record,
            free_cache=False,
        )
        proposer.drafted, proposer.pending = [], {}
        engine = make_engine(
            proposer=proposer, plan=DraftPlan.parse("3_1_4"), free_cache_engine=False
        )
        for tokens in (range(0), range(9), range(9, 18), range(vocab_size)):
            if tokens:
                engine.update_drafter(head_update(with_tokens([*tokens])))
            at = len(proposer.drafted)
            engine.run([make_request("a", [3, 4, 5], max_tokens=60)])
            assert not tokens or drafted_tokens(proposer, at) <= set(tokens)
        found.append(proposer.drafted)
    assert found[0] == found[1]
    graphs = proposer._graphs
    assert graphs is not None
    assert graphs.replayed > 8


def test_requests_draft_as_soon_as_an_untrained_head_is_updated() -> None:
    requests = mixed_requests(6, tokens=30, seed=4)
    reference = all_bits(make_engine().run(requests))
    head = new_head(shared_decoder())
    proposer = Recorder(head, dtype=torch.float32)
    proposer.drafted, proposer.pending = [], {}
    selector = ReportedSelector(
        PredefinedSelector(DraftPlan.chain(3)), notify=print, waits_for_head=True
    )
    engine = make_engine(proposer=proposer, selector=selector)
    for each in requests:
        engine.add(each)
    done = [one for _ in range(6) for one in engine.step()]
    assert not proposer.drafted
    assert engine.stats().recess_steps == 6
    # A resumed run publishes the head of its checkpoint. Version 0 is untrained.
    engine.update_drafter(replace(head_update(head), version=0))
    done += engine.step()
    assert not proposer.drafted
    engine.update_drafter(head_update(head))
    done += drain(engine)
    assert len(proposer.drafted) > 0
    assert all_bits(done) == reference
    # One more step passes before drafts begin.
    assert engine.stats().recess_steps == 8


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            torch.tensor([[1, 2, 3]]),
            "its draft_tokens are .*; send one int64",
        ),
        (torch.tensor([], dtype=torch.int64), "vocabulary has 0 tokens"),
        (torch.tensor([1.0, 2.0, 3.0]), "its draft_tokens are .*float32"),
        (torch.tensor([3, 2, 5]), "each once and in ascending order"),
        (torch.tensor([1, 2, 100000]), "must name tokens of the policy's"),
    ],
)
def test_a_wrong_draft_vocabulary_in_an_update_changes_nothing(
    tokens: torch.Tensor, message: str
) -> None:
    proposer = EagleProposer(with_tokens([1, 2, 3]), dtype=torch.float32)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(2))
    before = {n: t.clone() for n, t in proposer._head.state_dict().items()}
    with pytest.raises(EngineError, match=f"version 3 refused.*{message}"):
        engine.update_drafter(head_update(with_tokens([1, 2, 3], seed=2), draft_tokens=tokens))
    assert all(torch.equal(before[n], t) for n, t in proposer._head.state_dict().items())
    whole = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    with pytest.raises(EngineError, match="draft vocabulary has all tokens"):
        make_engine(proposer=whole, plan=DraftPlan.chain(2)).update_drafter(
            head_update(new_head(shared_decoder(), seed=2), draft_tokens=torch.tensor([1]))
        )


@pytest.mark.parametrize("kernels", [True, False])
def test_the_rows_of_a_draft_vocabulary_follow_the_policy(
    kernels: bool, request: pytest.FixtureRequest
) -> None:
    """After an update of the policy, drafts equal those of an engine that started with it."""
    if not kernels:
        request.getfixturevalue("without_kernels")
    tokens = [*range(0, shared_decoder().config.vocab_size, 2)]
    asked = make_request("a", [3, 4, 5], max_tokens=40, ignore_eos=True)
    found = []
    for starts_with_it in (True, False):
        proposer = Recorder(with_tokens(tokens), dtype=torch.float32)
        proposer.drafted, proposer.pending = [], {}
        first = make_decoder(9) if starts_with_it else make_decoder(8)
        engine = make_engine(first, proposer=proposer, plan=DraftPlan.chain(3))
        if not starts_with_it:
            engine.add(make_request("b", [7, 8], max_tokens=40, ignore_eos=True))
            for _ in range(5):
                engine.step()
            engine.update_weights(update_from(make_decoder(9), 1))
        proposer.drafted = []
        done = all_bits(engine.run([asked]))
        found.append((done, [drafts for drafts in proposer.drafted if drafts[0] == "a"]))
    assert found[0] == found[1]
