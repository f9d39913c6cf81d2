"""Tests of drafts by an EAGLE-3 head: its features and drafts, and that they are lossless."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from slipstream.drafter.sequences import policy_features
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models import Decoder
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.types import Generation, UpdateKind, WeightUpdate
from tests.inference.helpers import (
    VOCAB,
    all_bits,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
)
from tests.inference.speculation.test_eagle import Recorder

AUX_LAYERS = (0, 1, 3)


@cache
def policy() -> Decoder:
    return make_decoder(num_layers=4)


def new_head(tokens: Sequence[int] | None = None, seed: int = 1) -> Eagle3Head:
    head = Eagle3Head(policy().config, AUX_LAYERS, tokens)
    head.init_weights(seed, policy())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in head.named_parameters():
            if name.startswith(("fc", "midlayer")) and parameter.ndim == 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return head


def recorder(tokens: Sequence[int] | None = None) -> Recorder:
    made = Recorder(new_head(tokens), dtype=torch.float32)
    made.drafted, made.pending = [], {}
    return made


TREE = DraftPlan(4, 3, 9)


@pytest.mark.parametrize("tokens", [None, [*range(0, VOCAB, 3)]])
@pytest.mark.parametrize("prompt", [3, 140])
def test_drafts_equal_those_of_the_head_on_the_policys_aux_layers(
    prompt: int, tokens: list[int] | None
) -> None:
    """The longer prompts exceed one chunk of the head's prefill."""
    proposer = recorder(tokens)
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
    done = make_engine(policy(), proposer=proposer, plan=DraftPlan.chain(3)).run(requests)
    texts = {
        r.request_id: [*r.prompt_ids, *g.token_ids] for r, g in zip(requests, done, strict=True)
    }
    assert len(proposer.drafted) > 30
    with torch.no_grad():
        packed, head = policy().pack(torch.float32), proposer._head.pack(torch.float32)
        for name, length, chain in proposer.drafted:
            known = texts[name][:length]
            aux_layers = packed.forward(
                torch.tensor([known]), torch.arange(length)[None], aux_layers=AUX_LAYERS
            ).aux_layers
            assert aux_layers is not None
            ids = torch.tensor([[*known[1:], *chain]])
            given = torch.nn.functional.pad(aux_layers[:, : length - 1], (0, 0, 0, len(chain)))
            unrolled = head.unroll(ids, given, packed.embedding, len(chain))
            for draft, states in zip(chain, unrolled, strict=True):
                logits = head.logits(
                    states[0, length - 2 : length - 1], head.draft_lm_head(packed.lm_head)
                )
                assert int(logits.argmax()) == draft


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, [*range(0, VOCAB, 2)]])
def test_drafts_do_not_change_the_generated_tokens(
    dtype: torch.dtype, tokens: list[int] | None
) -> None:
    """Some requests truncate sampling to few tokens, so that no draft token may be sampled."""
    requests = mixed_requests(12, tokens=30)
    reference = all_bits(make_engine(policy(), dtype).run(requests))
    for limit, plan in ((1, TREE), (5, DraftPlan.chain(4)), (5, TREE), (64, DraftPlan.chain(4))):
        proposer = EagleProposer(new_head(tokens), dtype=dtype)
        engine = make_engine(policy(), dtype, proposer=proposer, plan=plan, max_num_seqs=limit)
        assert all_bits(engine.run(requests)) == reference
        stats = engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("plan", [DraftPlan.chain(3), TREE], ids=str)
def test_drafts_by_torch_do_not_change_the_generated_tokens(plan: DraftPlan) -> None:
    """Without CPU kernels, torch operations draft, as on a GPU."""
    requests = mixed_requests(8, tokens=20)
    reference = all_bits(make_engine(policy()).run(requests))
    proposer = EagleProposer(new_head([*range(0, VOCAB, 2)]), dtype=torch.float32)
    engine = make_engine(policy(), proposer=proposer, plan=plan)
    assert all_bits(engine.run(requests)) == reference
    assert engine.stats().accepted_tokens > 0


def test_union_drafts_are_lossless_with_preemption_and_changing_plans() -> None:
    requests = mixed_requests(7, tokens=24, seed=2)
    reference = all_bits(make_engine(policy()).run(requests))
    proposer = UnionProposer(recorder(), HistoryProposer())
    engine = make_engine(policy(), proposer=proposer, plan=DraftPlan.chain(3))
    rng, done = random.Random(0), list[Generation]()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        engine.plan = rng.choice([OFF, DraftPlan.chain(1), DraftPlan.chain(4), TREE])
        done += engine.step()
        if rng.random() < 0.4:
            engine.preempt([f"r{rng.randrange(7)}", f"r{rng.randrange(7)}"])
    assert engine.stats().preempted > 2
    assert all_bits(done) == reference


def test_drafts_after_an_update_come_from_the_new_head() -> None:
    proposer, other = recorder(), new_head(seed=9)
    engine = make_engine(policy(), proposer=proposer, plan=DraftPlan.chain(3))
    weights = [(name, p.detach()) for name, p in other.named_parameters()]
    engine.update_drafter(WeightUpdate(version=1, kind=UpdateKind.DRAFT, buckets=[weights]))
    request = make_request("r", [3, 4, 5], temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.run([request])
    again = Recorder(other, dtype=torch.float32)
    again.drafted, again.pending = [], {}
    make_engine(policy(), proposer=again, plan=DraftPlan.chain(3)).run([request])
    assert proposer.drafted == again.drafted
    with pytest.raises(EngineError, match=r"tensor lm_head\.weight is missing"):
        engine.update_drafter(
            WeightUpdate(version=2, kind=UpdateKind.DRAFT, buckets=[weights[:-1]])
        )


@pytest.mark.parametrize("with_drafts", [True, False])
def test_hidden_states_include_the_aux_layers(with_drafts: bool) -> None:
    """Covers chunked prefills, samples that share a prefill, and steps with drafts."""
    prompt = [3 + (j * j) % 40 for j in range(70)]
    requests = [
        make_request(f"h{i}", prompt[: 70 if i else 9], max_tokens=6 + 5 * i, hidden=True)
        for i in range(5)
    ]
    drafts = {"proposer": recorder(), "plan": DraftPlan.chain(3)}
    more = drafts if with_drafts else {"aux_layers": AUX_LAYERS}
    engine = make_engine(policy(), max_prefill_tokens=32, max_num_seqs=2, **more)
    done = engine.run(requests)
    with torch.no_grad():
        packed = policy().pack(torch.float32)
    for request, answer in zip(requests, done, strict=True):
        ids = [*request.prompt_ids, *answer.token_ids]
        (expected,) = policy_features(packed, [ids], aux_layers=AUX_LAYERS)
        (final,) = policy_features(packed, [ids])
        assert expected.shape == (len(ids), 4 * 32)
        assert torch.equal(expected[:, -32:], final)
        assert answer.context_hidden_states is not None
        assert answer.hidden_states is not None
        ours = torch.cat([answer.context_hidden_states, answer.hidden_states])
        assert torch.equal(ours, expected[:-1])


def test_aux_layers_must_equal_those_of_the_proposer() -> None:
    with pytest.raises(ConfigError, match=r"aux_layers=\[0, 1, 2\], .* needs \[0, 1, 3\]"):
        make_engine(policy(), proposer=recorder(), aux_layers=(0, 1, 2))
