"""Test helper: a character tokenizer with a chat template that writes headers."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def char_tokenizer(chat_template: str | None = CHATML) -> Any:
    """Return a tokenizer with one token per ASCII character, `<s>` (128) and `<e>` (129, eos)."""
    vocab = {chr(i): i for i in range(128)} | {"<s>": 128, "<e>": 129}
    backend = Tokenizer(WordLevel(vocab=vocab))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<e>",
        pad_token="<e>",
        additional_special_tokens=["<s>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def ids(text: str) -> list[int]:
    """Return the ids of `char_tokenizer` for `text`, computed independently."""
    out, place = [], 0
    while place < len(text):
        mark = text[place : place + 3]
        if mark in ("<s>", "<e>"):
            out.append(128 if mark == "<s>" else 129)
            place += 3
        else:
            out.append(ord(text[place]))
            place += 1
    return out
