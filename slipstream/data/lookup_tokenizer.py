"""Builds the tokenizer of the lookup task: its words, tool calls as few tokens, other text by
characters."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
ROLES = ("system", "user", "assistant", "tool")
CALL_TAGS = ("<tool_call>", "</tool_call>")
VOCAB_MULTIPLE = 16

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% set made = call.function or call %}"
    '{{ \'<tool_call>{"name": "\' + made.name + \'", "arguments": \' }}'
    "{{ made.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes tool calls in the hermes format. It only appends, and does not list the tools."""


def build_lookup_tokenizer(words: Sequence[str], phrases: Sequence[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are `words`, with and without a space before them, `phrases`,
    and printable ASCII characters. It encodes any ASCII text, and decoding gives the same text."""
    pieces = [*phrases, *(f" {word}" for word in words), *words]
    pieces = sorted(dict.fromkeys(pieces), key=len, reverse=True)
    characters = [*string.printable[:95], "\n", "\t"]
    special = [PAD, END, *(f"<{role}>" for role in ROLES), *CALL_TAGS]
    listed = list(dict.fromkeys([UNKNOWN, *special, *pieces, *characters]))
    listed += [f"<unused_{i}>" for i in range(-len(listed) % VOCAB_MULTIPLE)]
    backend = Tokenizer(
        WordLevel(vocab={piece: i for i, piece in enumerate(listed)}, unk_token=UNKNOWN)
    )
    pattern = "|".join([*map(re.escape, pieces), r"[\s\S]"])
    backend.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    backend.decoder = Fuse()
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in CALL_TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
