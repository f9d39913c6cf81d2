"""Converts items of a map-style data set to prompts, and prompts to verl's items.

An item is a mapping. Its prompt is in `input_ids` and `attention_mask`, or `raw_prompt_ids`, or as
messages in `raw_prompt` or `prompt`. Other fields are `data_source`, `reward_model`, `extra_info`,
`ability`, and any fields of the data set, which are passed to the reward function under their own
names. Knows nothing of files and order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.data.datasets import PromptReader
from slipstream.data.rows import DataRow, as_messages, ground_truth_of, mapping, null_column
from slipstream.errors import DataError
from slipstream.types import Message, Prompt

_TOKENS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids")
_READ = {*_TOKENS, "raw_prompt", "reward_model", "extra_info", "ability", "uid"}
"""Fields of an item that become fields of the prompt, and are not copied to `extra_info`."""
_EMPTY: dict[str, Any] = {"index": 0, "tools_kwargs": {}, "interaction_kwargs": {}}
"""Values that `as_item` fills in if a row's `extra_info` lacks them; they are not row data."""


class RenderedIds(list[int]):
    """The token ids of a prompt, with a copy of the messages that they were rendered from."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt.ids)
        self.messages = copy.deepcopy(prompt.messages)


def as_prompt(item: Any, *, reader: PromptReader, name: str, index: int) -> Prompt:
    """Return the whole prompt of item `index` of the data set `name`, without truncation.

    Its uid is the item's, else made from `name` and `index`. Raises DataError, naming both, for an
    item without a prompt or with a wrong type, and errors of its chat template.
    """
    where = f"{name}[{index}]"
    if not isinstance(item, Mapping):
        raise DataError(f"{where} must be a mapping of fields, got {type(item).__name__}")
    row = DataRow(Path(name), index, dict(item), name, where=where)
    messages = _messages(row, reader)
    ids = _ids(row)
    if isinstance(raw := item.get("raw_prompt_ids"), RenderedIds) and messages != raw.messages:
        ids = None  # a subclass has changed the messages, so render them again
    if ids is None:
        if messages is None:
            for key in ("raw_prompt", reader.prompt_key):
                if key in item:
                    raise null_column(row, key)
            raise DataError(
                f"{where} has no prompt: it needs input_ids, raw_prompt_ids, or messages in "
                f"raw_prompt or {reader.prompt_key} (fields: {', '.join(map(str, item))})"
            )
        ids = reader.text_ids(messages, where)
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens")
    source = row.values.get(reader.reward_fn_key)
    others = {
        str(key): value
        for key, value in item.items()
        if key not in _READ and key != reader.reward_fn_key and not _is_empty(key, value)
    }
    uid = item.get("uid")
    return Prompt(
        uid=str(uid) if uid is not None else f"{name}:{index}",
        ids=ids,
        messages=messages if messages is not None else "",
        data_source="" if source is None else str(source),
        ground_truth=ground_truth_of(row),
        extra_info={**others, **mapping(row, "extra_info")},
        ability=str(item.get("ability") or ""),
    )


def _is_empty(key: Any, value: Any) -> bool:
    return key in _EMPTY and type(value) is type(_EMPTY[key]) and bool(value == _EMPTY[key])


def _messages(row: DataRow, reader: PromptReader) -> str | list[Message] | None:
    for key in ("raw_prompt", reader.prompt_key):
        value = row.values.get(key)
        if isinstance(value, str):
            return value
        if value is not None:
            plain = value.tolist() if hasattr(value, "tolist") else value
            row.values[key] = list(plain) if isinstance(plain, Sequence) else plain
            return as_messages(row, key)
    return None


def _ids(row: DataRow) -> list[int] | None:
    """Return the token ids without padding; None if the item has no ids."""
    raw = row.values.get("raw_prompt_ids")
    if raw is not None:
        return _numbers(row, "raw_prompt_ids")
    if row.values.get("input_ids") is None:
        return None
    ids = _numbers(row, "input_ids")
    if row.values.get("attention_mask") is None:
        return ids
    mask = _numbers(row, "attention_mask")
    if len(mask) != len(ids):
        raise DataError(
            f"{row.where}: {len(ids)} input_ids, but an attention_mask of length {len(mask)}; make "
            "them equally long"
        )
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


def _numbers(row: DataRow, key: str) -> list[int]:
    value = row.values[key]
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, list | tuple) and len(listed) == 1 and isinstance(listed[0], list):
        (listed,) = listed  # a batch of one, which a tokenizer returns with `return_tensors`
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
        raise DataError(f"{row.where}: {key!r} must be a list of token ids, got {str(value)[:80]}")
    return [int(i) for i in listed]


def as_item(prompt: Prompt, row: Mapping[str, Any], *, length: int, pad: int) -> dict[str, Any]:
    """Return a prompt as an item of verl's `RLHFDataset`, with all columns of its `row`.

    `input_ids`, `attention_mask` and `position_ids` (length,) are padded on the left;
    `raw_prompt_ids` has no padding. `index`, `tools_kwargs` and `interaction_kwargs` come from
    `extra_info`.
    """
    ids = torch.full((length,), pad, dtype=torch.long)
    attention = torch.zeros(length, dtype=torch.long)
    start = length - len(prompt.ids)
    ids[start:] = torch.tensor(prompt.ids, dtype=torch.long)
    attention[start:] = 1
    extra = row.get("extra_info") or {}
    return {
        **row,
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(0) - 1).clamp(min=0),
        "raw_prompt_ids": RenderedIds(prompt),
        "raw_prompt": prompt.messages,
        **{key: extra.get(key, empty) for key, empty in _EMPTY.items()},
        "uid": prompt.uid,
    }
