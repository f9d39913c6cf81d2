"""Drafts from an EAGLE head: what is drafted, and that it changes nothing."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models import Decoder
from slipstream.models.draft_head import DraftHead
from slipstream.types import Generation
from tests.inference.helpers import (
    all_bits,
    make_engine,
    make_request,
    mixed_requests,
    shared_decoder,
)


def new_head(decoder: Decoder, seed: int = 1) -> DraftHead:
    head = DraftHead(decoder.config)
    head.init_weights(seed)
    return head


class Recorder(EagleProposer):
    """Keeps what it proposed, with the context it proposed it after."""

    drafted: list[tuple[str, int, list[int]]]

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        trees = super().propose(batch, plan)
        for name, position, tree in zip(
            batch.request_ids, batch.positions_N.tolist(), trees, strict=True
        ):
            self.drafted.append((name, position, [*tree.tokens[1:]]))
        return trees


def recorder(decoder: Decoder) -> Recorder:
    made = Recorder(new_head(decoder), dtype=torch.float32)
    made.drafted = []
    return made


def test_drafts_are_those_of_the_head_over_all_true_features() -> None:
    decoder = shared_decoder()
    proposer = recorder(decoder)
    requests = [
        make_request(f"d{i}", range(3, 6 + 3 * i), temperature=0.0, max_tokens=14, ignore_eos=True)
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
                out = head.forward(
                    given, features, torch.arange(len(tokens) - 1)[None], policy.embedding
                )
                assert int(policy.lm_head(out[0, -1:]).argmax()) == draft
                features = torch.cat([features, out[:, -1:]], dim=1)
                tokens.append(draft)


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
