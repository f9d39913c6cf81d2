"""Hidden states that the engine returns equal those of the trainer's forward pass."""

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
    """`count` samples of one prompt with `length` tokens."""
    prompt = random_prompt(random.Random(seed), length)
    return [
        make_request(f"{seed}/{i}", prompt, max_tokens=tokens + 5 * i, hidden=hidden)
        for i in range(count)
    ]


def assert_hidden_states_equal_the_trainers(
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
        states = torch.cat([answer.context_hidden_states, answer.hidden_states])
        assert torch.equal(states, expected[:-1])


def test_hidden_states_with_chunked_and_shared_prefills() -> None:
    requests = [*siblings(3, 70), *siblings(2, 9, seed=1), *siblings(1, 1, seed=2)]
    prior = random_prompt(random.Random(5), 20)
    requests.append(make_request("continued", requests[0].prompt_ids, prior=prior, hidden=True))
    engine = make_engine(max_prefill_tokens=32)
    assert_hidden_states_equal_the_trainers(shared_decoder(), requests, engine.run(requests))
    assert engine.stats().shared_prompt_tokens == 2 * 70 + 9


def test_hidden_states_are_returned_only_if_requested() -> None:
    (answer,) = make_engine().run(siblings(1, 20, hidden=False))
    assert answer.context_hidden_states is None
    assert answer.hidden_states is None


# With one row, each sample starts after the one before has ended. With two, it starts while another
# sample runs.
@pytest.mark.parametrize(
    ("rows", "stagger", "reused"), [(1, False, 0), (1, True, 3 * 39), (2, False, 2 * 39)]
)
def test_hidden_states_with_a_reused_prompt(rows: int, stagger: bool, reused: int) -> None:
    requests = siblings(4, 40)
    engine = make_engine(max_num_seqs=rows, stagger_samples=stagger)
    assert_hidden_states_equal_the_trainers(shared_decoder(), requests, engine.run(requests))
    assert engine.stats().reused_prompt_tokens == reused


def test_hidden_states_after_samples_of_the_prompt_without_hidden_states() -> None:
    asked = siblings(4, 40)
    quiet = siblings(2, 40, hidden=False)
    # The first sample keeps its prompt without hidden states, so the prompt is computed again.
    requests = [quiet[0], *asked[2:]]
    for stagger in (False, True):
        engine = make_engine(max_num_seqs=1, stagger_samples=stagger)
        done = engine.run(requests)
        assert_hidden_states_equal_the_trainers(shared_decoder(), asked[2:], done)
    # The second sample reuses the prompt. The third one needs hidden states, so it cannot share
    # this prefill and waits for the next one.
    engine = make_engine(max_num_seqs=3)
    engine.add(quiet[0])
    engine.step()
    for request in (quiet[1], asked[3]):
        engine.add(request)
    assert_hidden_states_equal_the_trainers(shared_decoder(), asked[3:], drain(engine))


def test_requests_with_hidden_states_do_not_use_the_prefix_cache() -> None:
    engine = make_engine(prefix_caching=True)
    (first,) = engine.run(siblings(1, 40))
    turn = [*siblings(1, 40)[0].prompt_ids, *first.token_ids, 7, 8, 9]
    requests = [make_request("turn", turn, max_tokens=9, hidden=True)]
    assert_hidden_states_equal_the_trainers(shared_decoder(), requests, engine.run(requests))
    # A request without hidden states uses it.
    before = engine.stats().reused_prompt_tokens
    engine.run([make_request("quiet", turn, max_tokens=9)])
    assert engine.stats().reused_prompt_tokens > before


def test_hidden_states_with_drafts_and_preemption() -> None:
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
    assert_hidden_states_equal_the_trainers(shared_decoder(), requests, done)


def updated(engine: Engine, version: int) -> Decoder:
    """Update the engine's weights, and return a decoder with the new weights."""
    decoder = make_decoder(seed=version)
    engine.update_weights(update_from(decoder, version))
    return decoder


def test_a_response_continued_after_an_update_has_hidden_states_of_the_new_weights() -> None:
    # Not the shared decoder, because the update changes its weights.
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
    assert_hidden_states_equal_the_trainers(newer, [more], [answer])


def test_after_an_update_a_sample_does_not_reuse_the_prompt_of_older_weights() -> None:
    # Not the shared decoder, because the update changes its weights.
    engine = make_engine(make_decoder())
    requests = siblings(2, 40)
    engine.add(requests[0])
    for _ in range(3):
        engine.step()
    newer = updated(engine, 1)
    engine.add(requests[1])
    done = {g.request_id: g for g in drain(engine)}
    assert [span.version for span in done["0/0"].spans] == [0, 1]
    # The prompt of the second sample is computed again.
    assert_hidden_states_equal_the_trainers(newer, requests[1:], [done["0/1"]])
