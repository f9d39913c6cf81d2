"""The draft vocabulary of a new head of RL."""

from __future__ import annotations

import pytest

from slipstream.build.speculation import first_head, head_to_be
from slipstream.config.load import load_config
from slipstream.models.decoder import Decoder
from tests.models.helpers import config


@pytest.mark.parametrize(
    ("algorithm", "given", "vocab_size", "tokens"),
    [
        ("EAGLE", "auto", 49_152, 8_192),
        ("EAGLE", "auto", 16_384, None),
        ("EAGLE", "20000", 49_152, 20_000),
        ("EAGLE", "null", 49_152, None),
        ("EAGLE3", "auto", 49_152, None),
    ],
)
def test_size_without_responses(
    algorithm: str, given: str, vocab_size: int, tokens: int | None
) -> None:
    eagle = "speculative.eagle"
    settings = load_config(
        recipe="tiny",
        overrides=[f"{eagle}.spec_algorithm={algorithm}", f"{eagle}.draft_vocab_size={given}"],
    )
    policy = config("llama", vocab_size=vocab_size, num_layers=8)
    head = head_to_be(settings, policy)
    assert (None if head.draft_tokens is None else head.draft_vocab_size) == tokens


def test_tokens_are_the_lowest_ids_and_the_end_tokens() -> None:
    policy = Decoder(config("llama", vocab_size=20_000, eos_token_id=(5, 19_000)))
    head, folder = first_head(load_config(recipe="tiny"), policy)
    assert folder is None
    assert head.tokens == (*range(8_191), 19_000)
