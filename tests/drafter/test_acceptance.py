"""Acceptance along known responses, against what the engine counts with the same head."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from slipstream.drafter.acceptance import Acceptance, measure_acceptance
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
        logits = ends_of(decoder).lm_head(sequence.features_TD[prompt - 1 :]).float()
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


def test_a_head_is_worse_only_beyond_chance() -> None:
    def needs(*verifications: int) -> Acceptance:
        """As many for each response, of twelve tokens."""
        rows = []
        for count in verifications:
            row = [0] * 12
            row[0] = 12 - count
            rows.append(row)
        return Acceptance(depth=12, lengths=rows)

    used = needs(6, 6, 6, 6)
    assert used.verifications(12) == [6, 6, 6, 6]
    assert not used.is_worse_than(used)
    assert not needs(5, 6, 7, 6).is_worse_than(used)
    # One more for one response is chance, for each of four it is not.
    assert not needs(6, 6, 7, 6).is_worse_than(used)
    assert needs(7, 7, 7, 7).is_worse_than(used)
    assert not used.is_worse_than(needs(7, 7, 7, 7))
    # Much worse is worse, however few responses say so.
    assert needs(12, 6, 6, 6).is_worse_than(used)
    assert needs(12, 5, 5, 5).is_worse_than(used)
