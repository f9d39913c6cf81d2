"""Turns the token ids of responses into the text that reward functions get.

Tags such as `<answer>` are special tokens in some tokenizers, and belong to the answer. Only the
token that ended the response does not. Knows tokenizers, not samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.data.end_tokens import end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ResponseDecoder:
    """A function from token ids to text.

    It leaves out the last token if that is one of `ends`, and with `skip_special_tokens` all
    special tokens, as verl and TRL do. Reward managers written for verl find the tokenizer and the
    configuration here.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    skip_special_tokens: bool = False
    config: object = None

    def __call__(self, ids: list[int]) -> str:
        kept = ids[:-1] if ids and ids[-1] in self.ends else ids
        return str(self.tokenizer.decode(kept, skip_special_tokens=self.skip_special_tokens))


def response_decoder(
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Iterable[int] | None = None,
    skip_special_tokens: bool = False,
    config: object = None,
) -> ResponseDecoder:
    """Return a function from token ids to text. `ends` None is `end_token_ids`. `config` is the
    run's configuration, None if unknown."""
    last = frozenset(end_token_ids(tokenizer) if ends is None else ends)
    return ResponseDecoder(tokenizer, last, skip_special_tokens, config)
