"""Measured acceptance against the counters of an engine with the same head."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from slipstream.drafter.acceptance import Acceptance, Regression, measure_acceptance
from slipstream.drafter.sequences import passes
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.sampling.choose import SamplingRows, choose
from slipstream.sampling.noise import key_words
from tests.drafter.helpers import new_head, requests, responses, sequences, trainer, vocab_of
from tests.inference.helpers import make_engine, shared_decoder


@pytest.fixture(scope="module")
def head() -> Any:
    """A head trained for a few steps, so that chains are correct to different depths."""
    decoder = shared_decoder()
    made = new_head(decoder)
    batches = passes(sequences(decoder, 64), 16, "acceptance")
    trainer(made).train(batches, vocab_of(decoder), steps=40)
    return made


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}],
    ids=str,
)
@pytest.mark.parametrize("part", [False, True])
def test_replay_counts_like_the_engine(
    head: Any, drafts: int, sampling: dict[str, float], part: bool
) -> None:
    decoder = shared_decoder()
    if part:
        # The tokens that the policy writes most here, so that some drafts are accepted.
        whole, head = head, DraftHead(decoder.config, [*range(1, decoder.config.vocab_size, 2)])
        head.load_state_dict(whole.state_dict(), strict=False)
    asked = requests(12, seed=9, **sampling)
    measured = measure_acceptance(
        head, responses(decoder, asked), vocab_of(decoder), depth=4, batch_size=5
    )
    engine = make_engine(
        proposer=EagleProposer(head, dtype=torch.float32), plan=DraftPlan.chain(drafts)
    )
    engine.run(asked)
    stats, replay = engine.stats(), measured.replay(drafts)
    assert replay.accepted > 3
    assert (replay.drafted, replay.accepted) == (stats.draft_tokens, stats.accepted_tokens)
    assert replay.tokens == stats.decode_tokens
    assert replay.tokens_per_verification == replay.tokens / (stats.draft_tokens / drafts)
    assert len(set(measured.prompts)) == len(measured.prompts) == 12


def test_responses_are_the_policys_choices_with_their_noise() -> None:
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
        logits = vocab_of(decoder).lm_head(sequence.features_TF[prompt - 1 :]).float()
    positions = torch.arange(prompt, T)
    chosen = choose(logits, positions, rows.repeated(T - prompt)).tokens
    assert chosen.tolist() == list(sequence.tokens[prompt:])


def test_shares_and_replays_match_a_count_by_hand() -> None:
    measured = Acceptance(depth=3, lengths=[[1, 0, 3, 2, 1], [0], []])
    assert measured.at_depth(1) == pytest.approx(4 / 6)
    assert measured.at_depth(2) == pytest.approx(2 / 4)
    assert measured.at_depth(3) == pytest.approx(1 / 3)
    # Verifications at positions 0 (one correct) and 2 (correct to the end, so the last draft does
    # not count) of the first response, and at position 0 of the second.
    replay = measured.replay(3)
    assert (replay.verifications, replay.drafted, replay.accepted, replay.tokens) == (3, 9, 3, 6)
    assert measured.replay(1).tokens_per_verification == pytest.approx(6 / 4)


def test_empty_response_gives_zero() -> None:
    measured = Acceptance(depth=2, lengths=[[]])
    assert measured.at_depth(1) == 0.0
    assert measured.replay(2).tokens_per_verification == 0.0


def needs(*verifications: int, prompts: str = "") -> Acceptance:
    """Acceptance in which each response, of twelve tokens, needs this many verifications."""
    rows = []
    for count in verifications:
        row = [0] * 12
        row[0] = 12 - count
        rows.append(row)
    return Acceptance(depth=12, lengths=rows, prompts=prompts)


def is_worse(one: Acceptance, other: Acceptance) -> bool:
    return one.regression_from(other).significant


def test_regression_is_significant_only_beyond_one_standard_error() -> None:
    used = needs(6, 6, 6, 6)
    assert used.verifications(12) == [6, 6, 6, 6]
    assert used.regression_from(used) == Regression()
    assert not is_worse(used, used)
    assert not is_worse(needs(5, 6, 7, 6), used)
    # One more verification for one response is chance; one more for each of four is not.
    assert needs(6, 6, 7, 6).regression_from(used) == Regression(1 / 24, 1 / 24**2)
    assert not is_worse(needs(6, 6, 7, 6), used)
    assert is_worse(needs(7, 7, 7, 7), used)
    assert not is_worse(used, needs(7, 7, 7, 7))
    # A regression above 10 % is significant with any number of responses.
    assert is_worse(needs(12, 6, 6, 6), used)
    assert is_worse(needs(12, 5, 5, 5), used)


def test_responses_to_one_prompt_are_one_cluster() -> None:
    used = needs(*[6] * 8)
    more = (7, 7, 7, 7, 6, 6, 6, 6)
    assert is_worse(needs(*more), used)
    # All four of one prompt and none of the other: that is chance.
    assert not is_worse(needs(*more, prompts="aaaabbbb"), used)
    assert is_worse(needs(*more, prompts="abababab"), used)
    assert needs(*more, prompts="aaaabbbb").regression_from(used) == Regression(4 / 48, 16 / 48**2)


def test_small_regressions_in_a_row_become_significant() -> None:
    one = needs(6, 6, 6, 6, 7, 7, 5).regression_from(needs(*[6] * 7))
    assert not one.significant
    assert not (one + one + one).significant
    assert (one + one + one + one).significant
