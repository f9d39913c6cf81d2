"""Drafts from an EAGLE head: what is drafted, and that it changes nothing."""

from __future__ import annotations

import random
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
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
    """Keeps what it proposed, with the context it proposed it after."""

    drafted: list[tuple[str, int, list[int]]]
    waiting: dict[int, dict[str, list[int]]]
    """The tokens that waited, by how many drafts there were before."""

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        self.waiting[len(self.drafted)] = self.tokens_that_wait()
        trees = super().propose(batch, plan)
        for name, position, tree in zip(
            batch.request_ids, batch.positions_N.tolist(), trees, strict=True
        ):
            self.drafted.append((name, position, [*tree.tokens[1:]]))
        return trees

    def tokens_that_wait(self) -> dict[str, list[int]]:
        waiting = self._waiting.of(self._in_order(self._order))
        if waiting is None:
            return {}
        parts = np.split(waiting.tokens_T, np.cumsum(waiting.counts_N)[:-1])
        return {name: part.tolist() for name, part in zip(self._order, parts, strict=True)}


def recorder(decoder: Decoder) -> Recorder:
    made = Recorder(new_head(decoder), dtype=torch.float32)
    made.drafted, made.waiting = [], {}
    return made


@pytest.mark.parametrize("prompt", [3, 140])
def test_drafts_are_those_of_the_head_over_all_true_features(prompt: int) -> None:
    """The longer prompts together are more than the head takes in at once."""
    decoder = shared_decoder()
    proposer = recorder(decoder)
    with torch.no_grad():
        # A head that has only begun looks at little but the last token.
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
def test_threads_draft_for_sequences_of_their_own_what_one_drafts_for_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "SHARED_FROM", 1)
    drafted, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            proposer = Recorder(new_head(shared_decoder()), dtype=dtype)
            proposer.drafted, proposer.waiting = [], {}
            engine = make_engine(dtype=dtype, proposer=proposer, plan=DraftPlan.chain(4))
            # Of those that are not cut off, for which drafting is one call.
            for request in [r for i, r in enumerate(mixed_requests(12)) if i % 6 < 3]:
                engine.add(request)
            drain(engine)
            drafted.append(proposer.drafted)
    finally:
        torch.set_num_threads(before)
    assert len(drafted[0]) > 20
    assert drafted[0] == drafted[1] == drafted[2]


@pytest.mark.parametrize("drafts", [1, 4])
def test_what_a_head_drafts_does_not_matter(drafts: int) -> None:
    requests = mixed_requests(12, tokens=30)
    reference = all_bits(make_engine().run(requests))
    for limit in (1, 5, 64):
        proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
        engine = make_engine(proposer=proposer, plan=DraftPlan.chain(drafts), max_num_seqs=limit)
        assert all_bits(engine.run(requests)) == reference
        stats = engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_rows_follow_preemption_switching_and_aborts() -> None:
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
    tokens, full, law = got.pop("r5")
    expected = reference.pop("r5")
    assert (tokens, full, law) == tuple(part[: len(tokens)] for part in expected)
    assert got == reference
    assert proposer._order == []


def test_features_that_waited_count_once_after_a_preemption() -> None:
    decoder = shared_decoder()
    # While the other runs on, what the first had waiting is not forgotten with the whole batch.
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
        # One for each token of its context but the last.
        (first, *_) = found[-1]
        assert len(proposer.waiting[0]["one"]) == first - 1
    usual, again = found
    # Preempted, it has one step less before the first draft: a prefill brings a token.
    common = usual.keys() & again.keys()
    assert len(common) > 3
    assert {n: usual[n] for n in common} == {n: again[n] for n in common}


def test_features_are_kept_as_they_are_read() -> None:
    decoder = shared_decoder()
    proposer, size = recorder(decoder), decoder.config.hidden_size
    with pytest.raises(EngineError, match=r"features are 32 numbers of torch.bfloat16, and the"):
        proposer.begin("a", [3, 4], [3, 4, 5], torch.zeros(2, size, dtype=torch.bfloat16))
    with pytest.raises(EngineError, match=r"features are 96 numbers .* takes 32 of torch.float32"):
        proposer.begin("a", [3, 4], [3, 4, 5], torch.zeros(2, 3 * size))
    features = torch.arange(2.0 * size).view(size, 2).T
    proposer.begin("b", [3, 4], [3, 4, 5], features)
    kept = proposer._rows["b"].features_TD
    assert kept is not None
    assert kept.is_contiguous()
    torch.testing.assert_close(kept, features, rtol=0, atol=0)


def test_what_waits_is_bounded() -> None:
    requests = [make_request(f"w{i}", max_tokens=30, ignore_eos=True) for i in range(3)]
    reference = all_bits(make_engine().run(requests))
    # Two steps of three features of 32 numbers.
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32, waiting_bytes=768)
    engine = make_engine(proposer=proposer, plan=OFF)
    for request in requests:
        engine.add(request)
    done = [g for _ in range(9) for g in engine.step()]
    assert len(proposer._waiting) == 2
    assert proposer._waiting.nbytes == 768
    engine.plan = DraftPlan.chain(3)
    while engine.has_work():
        done += engine.step()
    assert all_bits(done) == reference
    assert engine.stats().draft_tokens > 0


def test_what_requests_begin_with_is_bounded() -> None:
    decoder = shared_decoder()
    size = decoder.config.hidden_size
    features = torch.arange(20.0 * size).view(20, size)
    proposer = EagleProposer(
        new_head(decoder), dtype=torch.float32, waiting_bytes=25 * size * features.element_size()
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


def test_a_tight_budget_leaves_requests_undrafted() -> None:
    requests = [make_request(f"b{i}", max_tokens=20, ignore_eos=True) for i in range(3)]
    reference = all_bits(make_engine().run(requests))
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32, kv_budget_bytes=1)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(3))
    assert all_bits(engine.run(requests)) == reference
    assert engine.stats().draft_tokens == 0


def test_rows_of_another_engine_are_an_error() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(2))
    engine.add(make_request("one", max_tokens=9, ignore_eos=True))
    engine.step()
    proposer.begin("stranger", (3,), (3,), None)
    with pytest.raises(EngineError, match="rows of the draft head are not those of the engine"):
        engine.step()


def test_rows_in_another_order_are_an_error() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    engine = make_engine(proposer=proposer, plan=DraftPlan.chain(2))
    for name in ("one", "two"):
        engine.add(make_request(name, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    features = torch.zeros(2, 1, shared_decoder().config.hidden_size)
    with pytest.raises(EngineError, match="rows of the draft head are not those of the engine"):
        proposer.observe(["two", "one"], [(3,), (3,)], features)


def head_update(head: DraftHead, **changed: torch.Tensor) -> WeightUpdate:
    tensors = {name: p.detach().clone() for name, p in head.named_parameters()} | changed
    return WeightUpdate(version=3, buckets=[list(tensors.items())], kind=UpdateKind.DRAFT)


def test_an_update_in_mid_request_drafts_from_the_new_head() -> None:
    decoder, new = shared_decoder(), new_head(shared_decoder(), seed=2)
    requests = mixed_requests(6, tokens=30, seed=4)
    reference = all_bits(make_engine().run(requests))
    with torch.no_grad():
        # So that every weight has a say in what is drafted.
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
    # Drafts go on at once, and are those of the new head over the features since then.
    assert engine.stats().draft_tokens > 0
    texts = {r.request_id: [*r.prompt_ids, *reference[r.request_id][0]] for r in requests}
    # One that is greedy.
    later = [(n, chain) for name, n, chain in updated.drafted[at:] if name == "r1" and chain]
    first = later[0][0] - len(updated.waiting[at]["r1"])
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


def test_who_does_not_learn_takes_no_draft_weights() -> None:
    update = head_update(new_head(shared_decoder()))
    for engine in (make_engine(), make_engine(proposer=HistoryProposer())):
        with pytest.raises(EngineError, match="no draft head to update to 3"):
            engine.update_drafter(update)
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.float32)
    with pytest.raises(EngineError, match="takes draft weights, got full"):
        make_engine(proposer=proposer).update_drafter(update_from(shared_decoder(), 3))


def test_an_update_behind_the_protocol() -> None:
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


def test_an_updated_head_computes_in_the_dtype_that_it_did(dtype: torch.dtype) -> None:
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


def test_a_head_in_another_dtype_than_the_policy_is_refused() -> None:
    proposer = EagleProposer(new_head(shared_decoder()), dtype=torch.bfloat16)
    engine = make_engine(shared_decoder(), proposer=proposer, plan=DraftPlan.chain(2))
    engine.add(make_request("a", [3, 4, 5], max_tokens=8))
    with pytest.raises(EngineError, match=r"computes in torch.float32, and the draft head in torc"):
        drain(engine)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("plan", ["4_1_5", "3_2_6"])
def test_recorded_drafts_are_what_drafts_are(plan: str) -> None:
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
def test_recorded_drafts_are_those_of_new_weights() -> None:
    found = []
    for record in (None, trace):
        proposer = Recorder(
            new_head(shared_decoder()), dtype=torch.float32, record=record, free_cache=False
        )
        proposer.drafted, proposer.waiting = [], {}
        engine = make_engine(
            proposer=proposer, plan=DraftPlan.parse("3_1_4"), free_cache_engine=False
        )
        for name, seed in (("a", 5), ("b", 6), ("a", 5)):
            # Large enough for drafts to differ.
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
def test_contexts_may_end_where_the_cache_of_the_head_does(
    plan: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was verified beyond what was accepted needs no room. Laws that are cut are drafted column
    # by column, by kernels, too.
    if not by_kernels:
        monkeypatch.setattr("slipstream.models.numerics.kernels_supported", lambda: False)
    proposer = EagleProposer(new_head(make_decoder()), dtype=torch.float32)
    engine = make_engine(make_decoder(), proposer=proposer, plan=DraftPlan.parse(plan))
    reached: list[int] = []
    columns = DraftPass.__init__

    def checked(self: DraftPass, *given: Any) -> None:
        *_, kv, slots, num_keys = given
        reached.append(kv.shape[3] - int(slots.max()) - 1)
        assert min(reached[-1], kv.shape[3] - num_keys) >= 0
        columns(self, *given)

    monkeypatch.setattr(DraftPass, "__init__", checked)
    engine.run([make_request("a", [3, 4, 5], max_tokens=300, top_p=0.9)])
    # The last slot of one capacity is nearly reached: levels of a tree are the slack.
    assert min(reached) < 8
