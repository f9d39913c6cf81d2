"""Hidden states of whole responses: those of the trainer's forward pass, whatever befell them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from slipstream.drafter.sequences import policy_features
from slipstream.inference.engine import Engine
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models import Decoder
from slipstream.types import GenerateRequest, Generation, VersionSpan
from tests.inference.engine.test_speculation import oracle_of
from tests.inference.helpers import (
    all_bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    random_prompt,
    shared_decoder,
    update_from,
)


def siblings(
    count: int, length: int, *, seed: int = 0, hidden: bool = True, tokens: int = 6
) -> list[GenerateRequest]:
    prompt = random_prompt(random.Random(seed), length)
    return [
        make_request(f"{seed}/{i}", prompt, max_tokens=tokens + 5 * i, hidden=hidden)
        for i in range(count)
    ]


def assert_those_of(
    decoder: Decoder, requests: Sequence[GenerateRequest], done: Sequence[Generation]
) -> None:
    with torch.no_grad():
        packed = decoder.pack(torch.float32)
    answers = {g.request_id: g for g in done}
    for request in requests:
        answer = answers[request.request_id]
        ids = [*request.prompt_ids, *request.prior_ids, *answer.token_ids]
        (expected,) = policy_features(packed, [ids])
        assert answer.context_hidden_states is not None
        assert answer.hidden_states is not None
        assert not answer.context_hidden_states.is_inference()
        ours = torch.cat([answer.context_hidden_states, answer.hidden_states])
        assert torch.equal(ours, expected[:-1])


def test_of_contexts_in_pieces_and_of_siblings_that_share_a_prefill() -> None:
    requests = [*siblings(3, 70), *siblings(2, 9, seed=1), *siblings(1, 1, seed=2)]
    prior = random_prompt(random.Random(5), 20)
    requests.append(make_request("goes on", requests[0].prompt_ids, prior=prior, hidden=True))
    engine = make_engine(max_prefill_tokens=32)
    assert_those_of(shared_decoder(), requests, engine.run(requests))
    assert engine.stats().shared_prompt_tokens == 2 * 70 + 9


def test_what_is_not_asked_for_is_not_handed_over() -> None:
    (answer,) = make_engine().run(siblings(1, 20, hidden=False))
    assert answer.context_hidden_states is None
    assert answer.hidden_states is None


# One row: the second begins when the first has left; two: beside one that runs.
@pytest.mark.parametrize(
    ("rows", "stagger", "reused"), [(1, False, 0), (1, True, 3 * 39), (2, False, 2 * 39)]
)
def test_of_later_siblings_whose_prompt_is_taken_over(
    rows: int, stagger: bool, reused: int
) -> None:
    requests = siblings(4, 40)
    engine = make_engine(max_num_seqs=rows, stagger_samples=stagger)
    assert_those_of(shared_decoder(), requests, engine.run(requests))
    assert engine.stats().reused_prompt_tokens == reused


def test_of_a_sibling_of_those_that_were_not_asked() -> None:
    asked = siblings(4, 40)
    quiet = siblings(2, 40, hidden=False)
    # The first's prompt was kept for others without its hidden states, so it is computed again.
    requests = [quiet[0], *asked[2:]]
    for stagger in (False, True):
        engine = make_engine(max_num_seqs=1, stagger_samples=stagger)
        done = engine.run(requests)
        assert_those_of(shared_decoder(), asked[2:], done)
    # In one prefill, which begins where another's prompt ends: the one that is asked comes after.
    engine = make_engine(max_num_seqs=3)
    engine.add(quiet[0])
    engine.step()
    for request in (quiet[1], asked[3]):
        engine.add(request)
    assert_those_of(shared_decoder(), asked[3:], drain(engine))


def test_of_a_context_that_begins_as_another_one_ended() -> None:
    engine = make_engine(prefix_caching=True)
    (first,) = engine.run(siblings(1, 40))
    turn = [*siblings(1, 40)[0].prompt_ids, *first.token_ids, 7, 8, 9]
    requests = [make_request("turn", turn, max_tokens=9, hidden=True)]
    assert_those_of(shared_decoder(), requests, engine.run(requests))
    # Who does not ask takes over what is there.
    before = engine.stats().reused_prompt_tokens
    engine.run([make_request("quiet", turn, max_tokens=9)])
    assert engine.stats().reused_prompt_tokens > before


def test_with_drafts_and_preemption() -> None:
    requests = [*siblings(3, 40, tokens=40), *siblings(3, 5, seed=1, tokens=40)]
    reference = make_engine().run(requests)
    engine = make_engine(
        proposer=oracle_of(reference), plan=DraftPlan.chain(3), stagger_samples=True
    )
    rng, done = random.Random(0), list[Generation]()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        done += engine.step()
        running = [r.request_id for r in engine._scheduler.running]
        if running and rng.random() < 0.4:
            engine.preempt(rng.sample(running, 1))
    assert engine.stats().preempted > 3
    assert engine.stats().accepted_tokens > 10
    assert all_bits(done) == all_bits(reference)
    assert_those_of(shared_decoder(), requests, done)


def updated(engine: Engine, version: int) -> Decoder:
    decoder = make_decoder(seed=version)
    engine.update_weights(update_from(decoder, version))
    return decoder


def test_a_response_that_goes_on_under_new_weights_has_their_states_alone() -> None:
    # Its own: an update changes the weights of the decoder that the engine was made with.
    engine = make_engine(make_decoder())
    (request,) = siblings(1, 40)
    engine.add(request)
    for _ in range(3):
        engine.step()
    (left,) = engine.abort()
    assert left.hidden_states is not None
    assert len(left.hidden_states) == len(left.token_ids)
    newer = updated(engine, 1)
    more = make_request("more", request.prompt_ids, prior=left.token_ids, max_tokens=5, hidden=True)
    (answer,) = engine.run([more])
    assert answer.spans == [VersionSpan(1, 0, 5)]
    assert_those_of(newer, [more], [answer])


def test_an_update_under_way_leaves_states_of_both_which_the_spans_say() -> None:
    # Its own: an update changes the weights of the decoder that the engine was made with.
    engine = make_engine(make_decoder())
    requests = siblings(2, 40)
    engine.add(requests[0])
    for _ in range(3):
        engine.step()
    newer = updated(engine, 1)
    engine.add(requests[1])
    done = {g.request_id: g for g in drain(engine)}
    assert [span.version for span in done["0/0"].spans] == [0, 1]
    # The sibling's prompt is computed anew.
    assert_those_of(newer, requests[1:], [done["0/1"]])
