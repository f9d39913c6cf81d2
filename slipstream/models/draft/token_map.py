"""Read and write the draft vocabulary of a head in its files.

Published EAGLE-3 heads describe it with two tensors: `d2t` holds the offsets from draft ids to the
policy's ids, and `t2d` marks which of the policy's tokens are in it. EAGLE-1 heads with a draft
vocabulary have the same two tensors here, and for SGLang a separate file instead. The other modules
for files of heads call this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.draft.model import DraftModel

OFFSETS, MASK = "d2t", "t2d"
SIZE = "draft_vocab_size"
"""The entry of `config.json`."""
TOKEN_MAP = "hot_token_ids.pt"
"""SGLang's file for EAGLE-1 heads: a list of the token ids, written by `torch.save`."""


def map_tensors(head: DraftModel) -> dict[str, Tensor]:
    """Return the tensors that describe the draft vocabulary; none if it has all tokens."""
    if head.draft_tokens is None:
        return {}
    tokens = head.draft_tokens.cpu()
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[tokens] = True
    return {OFFSETS: tokens - torch.arange(len(tokens)), MASK: known}


def tokens_in(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab_size: int
) -> tuple[int, ...] | None:
    """Return the draft vocabulary, None for all tokens.

    `raw` is the head's `config.json`, and `tensors` its file's tensors. Raises ConfigError if the
    map is missing or invalid.
    """
    size = raw.get(SIZE) or vocab_size
    offsets, known = tensors.get(OFFSETS), tensors.get(MASK)
    if offsets is None and size == vocab_size:
        return None
    if offsets is None or offsets.dtype not in (torch.int32, torch.int64):
        shown = "missing" if offsets is None else f"of {offsets.dtype}"
        raise ConfigError(
            f"a draft vocabulary of {size} of {vocab_size} tokens needs {OFFSETS}, the integer "
            f"offsets from its ids to the policy's, but {OFFSETS} is {shown}; export the head "
            "again"
        )
    if offsets.shape != (size,):
        raise ConfigError(
            f"{OFFSETS} has shape {tuple(offsets.shape)}, but {SIZE} is {size}; export the head "
            "again"
        )
    tokens = (offsets.long() + torch.arange(len(offsets))).tolist()
    if known is not None:
        named = set(known.flatten().nonzero()[:, 0].tolist())
        if known.shape != (vocab_size,) or named != set(tokens):
            raise ConfigError(
                f"{MASK} names other tokens than {OFFSETS}, or does not have one number for each "
                f"of {vocab_size} tokens; export the head again"
            )
    return None if tokens == list(range(vocab_size)) else tuple(tokens)


def listed_tokens(folder: Path) -> tuple[int, ...] | None:
    """Return the draft vocabulary in SGLang's file in `folder`; None without the file.

    Raises ConfigError if the file holds no list of token ids.
    """
    file = folder / TOKEN_MAP
    if not file.is_file():
        return None
    try:
        found = torch.load(file, weights_only=True)
        ids = found.tolist() if isinstance(found, Tensor) else found
    except Exception as error:  # torch.load raises errors of many types
        raise ConfigError(f"{TOKEN_MAP} cannot be read: {error}; export the head again") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ConfigError(f"{TOKEN_MAP} holds no list of token ids; export the head again")
    return tuple(sorted(ids))
