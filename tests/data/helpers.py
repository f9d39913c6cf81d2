"""Test helpers: tokenizers of characters and bytes, and chat templates in many styles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


_LOOP = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{}{{% endif %}}"

STYLES = {
    "chatml": _LOOP.format(
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n", "<|im_start|>assistant\n"
    ),
    "llama3": "{{ bos_token }}"
    + _LOOP.format(
        "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}"
    + _LOOP.format(
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "phi3": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    "zephyr": _LOOP.format(
        "<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n", "<|assistant|>\n"
    ),
    "deepseek": "{{ bos_token }}"
    + _LOOP.format(
        "{% if m['role'] == 'user' %}<\uff5cUser\uff5c>{{ m['content'] }}{% else %}"
        "<\uff5cAssistant\uff5c>{{ m['content'] }}<\uff5cend▁of▁sentence\uff5c>{% endif %}",
        "<\uff5cAssistant\uff5c>",
    ),
    "two_tokens": _LOOP.format(
        "<|TURN|>{{ m['role'] }}<|TEXT|>{{ m['content'] }}<|END_TEXT|><|END_TURN|>",
        "<|TURN|>assistant<|TEXT|>",
    ),
    "last_differs": "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "needs_system": "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}"
    + _LOOP.format("<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n", "<|im_start|>"),
    "forgets_thoughts": "{% for m in messages %}{% set last = loop.last %}<|im_start|>"
    "{{ m['role'] }}\n{% if m['role'] == 'assistant' and last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "dated": "Today: {{ strftime_now('%d %b %Y %H:%M') }}. "
    + _LOOP.format("{{ m['role'] }}: {{ m['content'] }}<|end|>", "assistant: "),
    "plain": _LOOP.format("### {{ m['role'] }}:\n{{ m['content'] }}\n\n", "### assistant:\n"),
}
"""Chat templates in the styles of public models, by style."""


def char_tokenizer(chat_template: str | None = CHATML) -> Any:
    """Return a tokenizer with one token per ASCII character, `<s>` (128) and `<e>` (129, eos)."""
    vocab = {chr(i): i for i in range(128)} | {"<s>": 128, "<e>": 129}
    backend = Tokenizer(WordLevel(vocab=vocab))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
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


def byte_tokenizer(special: Sequence[str], chat_template: str | None, **options: Any) -> Any:
    """Return a byte-level tokenizer whose vocabulary is all bytes and the `special` tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **options
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def metaspace_tokenizer(
    scheme: str = "first", chat_template: str | None = STYLES["zephyr"], **options: Any
) -> Any:
    """Return a tokenizer in the style of Zephyr and TinyLlama, with characters as tokens.

    It writes spaces as `\u2581`, and one before a text: before the first (`first`), before the text
    after each special token, too (`always`), or with a normalizer (`legacy`).
    """
    characters = [chr(i) for i in range(33, 127)]
    words = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", *characters, "\u2581a", "ab"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("\u2581", "a"), ("a", "b")]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **options,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
