"""Check that a critic, reference model or teacher has the same vocabulary as the policy."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import CheckpointError
from slipstream.models.config import ModelConfig
from slipstream.models.hf_policy import HFPolicyConfig


def check_vocabulary(
    other: ModelConfig | HFPolicyConfig,
    policy: ModelConfig | HFPolicyConfig,
    *,
    role: str,
    source: str,
    remedy: str,
    other_vocab: Mapping[str, int] | None = None,
    policy_vocab: Mapping[str, int] | None = None,
) -> None:
    """Raise an error if another model's vocabulary differs from the policy's.

    `other_vocab` and `policy_vocab` are the tokenizers' `get_vocab()`, if there are tokenizers.
    Then they decide, because models pad their embeddings differently. Without tokenizers the
    vocabulary sizes decide. For the message, `role` says what the other model is used for, `source`
    names it, and `remedy` says what to do.

    Raises:
        CheckpointError: the vocabularies differ, or the model has no embedding for a token.
    """
    if other_vocab is not None and policy_vocab is not None:
        if other_vocab != policy_vocab:
            odd = sorted(set(other_vocab.items()) ^ set(policy_vocab.items()))
            raise CheckpointError(
                f"{source}: the {role}'s tokenizer is not the policy's: {len(odd)} entries differ, "
                f"such as {odd[0][0]!r} -> {odd[0][1]}; {remedy}"
            )
        highest = max(policy_vocab.values(), default=-1)
        if highest >= other.vocab_size:
            raise CheckpointError(
                f"{source}: the {role} has {other.vocab_size} embeddings, but the tokenizer has "
                f"tokens up to id {highest}; {remedy}"
            )
    elif other.vocab_size != policy.vocab_size:
        raise CheckpointError(
            f"{source}: the {role}'s vocabulary has {other.vocab_size} tokens, but the policy's "
            f"has {policy.vocab_size}; {remedy}"
        )
