"""Acceptance along known responses, against what the engine counts with the same head."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from slipstream.drafter.acceptance import Acceptance, Loss, measure_acceptance
from slipstream.drafter.sequences import passes
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.sampling.choose import SamplingRows, choose
from slipstream.sampling.noise import key_words
from tests.drafter.helpers import ends_of, new_head, requests, responses, sequences, trainer
from tests.inference.helpers import make_engine, shared_decoder


@pytest.fixture(scope="module")
def head() -> Any:
    """A head that has learned a little, so that chains are right to different depths."""
    decoder = shared_decoder()
    made = new_head(decoder)
    batches = passes(sequences(decoder, 64), 16, "acceptance")
    trainer(made).train(batches, ends_of(decoder), steps=40)
    return made


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}],
    ids=str,
)
def test_the_walk_counts_what_the_engine_counts(
    head: Any, drafts: int, sampling: dict[str, float]
) -> None:
    decoder = shared_decoder()
    asked = requests(12, seed=9, **sampling)
    measured = measure_acceptance(
        head, responses(decoder, asked), ends_of(decoder), depth=4, batch_size=5
    )
    engine = make_engine(
        proposer=EagleProposer(head, dtype=torch.float32), plan=DraftPlan.chain(drafts)
    )
    engine.run(asked)
    stats, walk = engine.stats(), measured.walk(drafts)
    assert walk.accepted > 3
    assert (walk.drafted, walk.accepted) == (stats.draft_tokens, stats.accepted_tokens)
    assert walk.tokens == stats.decode_tokens
    assert walk.tokens_per_verification == walk.tokens / (stats.draft_tokens / drafts)
    assert len(set(measured.prompts)) == len(measured.prompts) == 12


def test_a_response_is_what_the_policy_chooses_under_its_noise() -> None:
    decoder = shared_decoder()
    (held_out,) = responses(decoder, requests(1, seed=4, temperature=0.8))
    sequence, params = held_out.sequence, held_out.params
    rows = SamplingRows.of(
        [key_words(astuple(held_out.key))],
        temperatures=[params.temperature],
        top_ks=[params.top_k],
        top_ps=[params.top_p],
        min_ps=[params.min_p],
        device=torch.device("cpu"),
    )
    T = len(sequence.tokens)
    prompt = int(T - sum(sequence.loss_mask))
    with torch.no_grad():
        logits = ends_of(decoder).lm_head(sequence.features_TF[prompt - 1 :]).float()
    positions = torch.arange(prompt, T)
    chosen = choose(logits, positions, rows.repeated(T - prompt)).tokens
    assert chosen.tolist() == list(sequence.tokens[prompt:])


def test_shares_and_walks_are_those_of_a_count_by_hand() -> None:
    measured = Acceptance(depth=3, lengths=[[1, 0, 3, 2, 1], [0], []])
    assert measured.at_depth(1) == pytest.approx(4 / 6)
    assert measured.at_depth(2) == pytest.approx(2 / 4)
    assert measured.at_depth(3) == pytest.approx(1 / 3)
    # Places 0 (one right), 2 (right to the end, which the third ends), and 0 of the second.
    walk = measured.walk(3)
    assert (walk.verifications, walk.drafted, walk.accepted, walk.tokens) == (3, 9, 3, 6)
    assert measured.walk(1).tokens_per_verification == pytest.approx(6 / 4)


def test_a_depth_that_is_not_there_counts_nothing() -> None:
    measured = Acceptance(depth=2, lengths=[[]])
    assert measured.at_depth(1) == 0.0
    assert measured.walk(2).tokens_per_verification == 0.0


def needs(*verifications: int, prompts: str = "") -> Acceptance:
    """As many for each response, of twelve tokens."""
    rows = []
    for count in verifications:
        row = [0] * 12
        row[0] = 12 - count
        rows.append(row)
    return Acceptance(depth=12, lengths=rows, prompts=prompts)


def is_worse(one: Acceptance, other: Acceptance) -> bool:
    return one.loss_against(other).beyond_chance


def test_a_head_is_worse_only_beyond_chance() -> None:
    used = needs(6, 6, 6, 6)
    assert used.verifications(12) == [6, 6, 6, 6]
    assert used.loss_against(used) == Loss()
    assert not is_worse(used, used)
    assert not is_worse(needs(5, 6, 7, 6), used)
    # One more for one response is chance, for each of four it is not.
    assert needs(6, 6, 7, 6).loss_against(used) == Loss(1 / 24, 1 / 24**2)
    assert not is_worse(needs(6, 6, 7, 6), used)
    assert is_worse(needs(7, 7, 7, 7), used)
    assert not is_worse(used, needs(7, 7, 7, 7))
    # Much worse is worse, however few responses say so.
    assert is_worse(needs(12, 6, 6, 6), used)
    assert is_worse(needs(12, 5, 5, 5), used)


def test_responses_to_one_prompt_say_the_same_thing_once() -> None:
    used = needs(*[6] * 8)
    more = (7, 7, 7, 7, 6, 6, 6, 6)
    assert is_worse(needs(*more), used)
    # Of one prompt all four, of the other none: that is chance.
    assert not is_worse(needs(*more, prompts="aaaabbbb"), used)
    assert is_worse(needs(*more, prompts="abababab"), used)
    assert needs(*more, prompts="aaaabbbb").loss_against(used) == Loss(4 / 48, 16 / 48**2)


def test_small_losses_in_a_row_are_no_chance() -> None:
    one = needs(6, 6, 6, 6, 7, 7, 5).loss_against(needs(*[6] * 7))
    assert not one.beyond_chance
    assert not (one + one + one).beyond_chance
    assert (one + one + one + one).beyond_chance
