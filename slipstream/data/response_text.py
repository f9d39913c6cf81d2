"""Turns the token ids of responses into the text that reward functions get.

Tags such as `<answer>` are special tokens in some tokenizers, and belong to the answer. Only the
token that ended the response does not. Knows tokenizers, not samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from slipstream.data.end_tokens import end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def response_decoder(
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Iterable[int] | None = None,
    skip_special_tokens: bool = False,
) -> Callable[[list[int]], str]:
    """Return a function from token ids to text.

    It leaves out the last token if that is one of `ends` (None: `end_token_ids`), and with
    `skip_special_tokens` all special tokens, as verl and TRL do.
    """
    last = frozenset(end_token_ids(tokenizer) if ends is None else ends)

    def decode(ids: list[int]) -> str:
        kept = ids[:-1] if ids and ids[-1] in last else ids
        return str(tokenizer.decode(kept, skip_special_tokens=skip_special_tokens))

    return decode
