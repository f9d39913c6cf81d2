"""The vocabulary check between a policy and another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.errors import CheckpointError
from slipstream.models.vocabulary import check_vocabulary
from tests.models.helpers import make_decoder


def test_a_different_vocabulary_raises_an_error() -> None:
    config = make_decoder("qwen3").config
    wider = replace(config, vocab_size=config.vocab_size + 16)
    vocab = {"a": 0, "b": 1}

    def check(critic: Any, policy: Any = config, **vocabularies: Any) -> None:
        check_vocabulary(
            critic,
            policy,
            role="critic",
            source="critic.model.path=c",
            remedy="take another",
            **vocabularies,
        )

    check(config)
    with pytest.raises(CheckpointError, match=r"path=c: the critic's vocabulary.*take another"):
        check(wider)
    with pytest.raises(CheckpointError, match="the critic's vocabulary"):
        check(wider, policy_vocab=vocab)
    # The same tokenizer with differently padded embeddings is fine.
    check(wider, other_vocab=vocab, policy_vocab=vocab)
    with pytest.raises(CheckpointError, match="2 entries differ, such as 'b' -> 1"):
        check(config, other_vocab={"a": 0, "c": 1}, policy_vocab=vocab)
    large = {"a": 0, "z": config.vocab_size}
    with pytest.raises(CheckpointError, match=r"path=c: the critic has .* embeddings.*take anoth"):
        check(config, other_vocab=large, policy_vocab=large)
