"""The token that ends an assistant turn is found in templates of many styles."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from slipstream.data import end_tokens
from slipstream.data.end_tokens import end_token_ids, turn_end
from slipstream.data.sft import tokenize_conversation
from tests.data.helpers import STYLES, byte_tokenizer

TURNS = [
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "a"},
]
_TOKEN = re.compile(r"<[|\uff5c][^|\uff5c{}]+[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]")


def tokenizer_of(style: str, eos: str = "<eos>") -> Any:
    """A tokenizer with all special tokens of the template, and with `eos` as eos_token."""
    special = dict.fromkeys(["<bos>", "</s>", "<eos>", *_TOKEN.findall(STYLES[style])])
    return byte_tokenizer([*special], STYLES[style], bos_token="<bos>", eos_token=eos)


ENDS = {
    "chatml": ("<eos>", "<|im_end|>"),
    "llama3": ("<eos>", "<|eot_id|>"),
    "mistral": ("</s>", "</s>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "phi3": ("<eos>", "<|end|>"),
    "zephyr": ("</s>", "</s>"),
    "deepseek": ("<eos>", "<\uff5cend▁of▁sentence\uff5c>"),
    "two_tokens": ("<eos>", "<|END_TURN|>"),
    "last_differs": ("<eos>", "<|return|>"),
    "needs_system": ("<eos>", "<|im_end|>"),
}


@pytest.mark.parametrize("style", ENDS)
def test_the_turn_ends_with_the_templates_token(style: str) -> None:
    eos, end = ENDS[style]
    tokenizer = tokenizer_of(style, eos)
    found = turn_end(tokenizer)
    assert found is not None
    assert tokenizer.convert_ids_to_tokens(found) == end
    names = [tokenizer.convert_ids_to_tokens(i) for i in end_token_ids(tokenizer)]
    assert names == list(dict.fromkeys([eos, end]))


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "phi3", "deepseek", "last_differs"])
def test_loss_ends_at_the_end_of_the_turn(style: str) -> None:
    eos, end = ENDS[style]
    tokenizer = tokenizer_of(style, eos)
    conversation = tokenize_conversation(TURNS, tokenizer)
    learnt = [i for i, m in zip(conversation.ids, conversation.loss_mask, strict=True) if m]
    prefix = "<|message|>" if style == "last_differs" else ""
    assert tokenizer.decode(learnt) == f"{prefix}a{end}"


def test_a_token_of_two_that_is_the_eos_token_is_preferred() -> None:
    tokenizer = tokenizer_of("two_tokens", "<|END_TEXT|>")
    assert turn_end(tokenizer) == tokenizer.eos_token_id


def test_tokens_that_are_added_but_not_special_count() -> None:
    tokenizer = byte_tokenizer(["<eos>"], STYLES["chatml"], eos_token="<eos>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_template_options_are_used() -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '<a>' if short is defined and short else '<b>' }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(["<a>", "<b>"], template)
    ids = tokenizer.convert_tokens_to_ids(["<a>", "<b>"])
    assert [turn_end(tokenizer, {"short": True}), turn_end(tokenizer)] == ids
    tokenizer.chat_template = template.replace("<b>", "<a>")
    assert turn_end(tokenizer) == ids[0]


def test_a_turn_without_special_token_ends_with_eos_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_tokens, "_told", set())
    tokenizer = tokenizer_of("plain")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert end_token_ids(tokenizer) == (tokenizer.eos_token_id,)
    (warning,) = caplog.messages
    assert "<eos>" in warning
    assert "actor_rollout_ref.model.custom_chat_template" in warning


def test_without_a_template_only_eos_ends_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_tokenizer(["<eos>"], None, eos_token="<eos>")
    with caplog.at_level(logging.WARNING):
        assert end_token_ids(tokenizer) == (tokenizer.eos_token_id,)
        assert end_token_ids(byte_tokenizer(["<eos>"], None)) == ()
    assert not caplog.messages
