"""Prompts from the items of a map-style data set, and items from prompts, in VERL's terms.

An item is a mapping: `input_ids` and `attention_mask`, or `raw_prompt_ids`, or messages in
`raw_prompt` or `prompt`; `data_source`, `reward_model`, `extra_info`, `ability`; and whatever else
a data set has, which goes to the reward function by its own name. Knows no files and no order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.data.datasets import PromptReader
from slipstream.data.rows import DataRow, as_messages, ground_truth_of, mapping
from slipstream.errors import DataError
from slipstream.types import Message, Prompt

_TOKENS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids")
_READ = {*_TOKENS, "raw_prompt", "reward_model", "extra_info", "ability", "uid"}
"""Fields of an item that a prompt has as its own, and under no second name."""
_EMPTY: dict[str, Any] = {"index": 0, "tools_kwargs": {}, "interaction_kwargs": {}}
"""What `as_item` gives where a row's `extra_info` says nothing: none of it is the row's."""


class RenderedIds(list[int]):
    """The token ids of `messages`, as they were then."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt.ids)
        self.messages = copy.deepcopy(prompt.messages)


def as_prompt(item: Any, *, reader: PromptReader, name: str, index: int) -> Prompt:
    """The whole prompt of item `index` of the data set `name`, however long.

    Its uid is the item's own, else made of `name` and `index`. Raises `DataError` that names both
    for an item without a prompt, or of a wrong type, and what its chat template raises.
    """
    where = f"{name}[{index}]"
    if not isinstance(item, Mapping):
        raise DataError(f"{where} must be a mapping of fields, got {type(item).__name__}")
    row = DataRow(Path(name), index, dict(item), name, where=where)
    messages = _messages(row, reader)
    ids = _ids(row)
    if isinstance(raw := item.get("raw_prompt_ids"), RenderedIds) and messages != raw.messages:
        ids = None  # the item's class has rewritten the messages
    if ids is None:
        if messages is None:
            raise DataError(
                f"{where} has no prompt: it needs input_ids, raw_prompt_ids, or messages in "
                f"raw_prompt or {reader.prompt_key} (it has: {', '.join(map(str, item))})"
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
    """Token ids without padding; None where there are none."""
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
            f"{row.where}: {len(ids)} input_ids and an attention_mask of {len(mask)}; they must be "
            "of one length"
        )
    return [token for token, there in zip(ids, mask, strict=True) if there]


def _numbers(row: DataRow, key: str) -> list[int]:
    value = row.values[key]
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, list | tuple) and len(listed) == 1 and isinstance(listed[0], list):
        (listed,) = listed  # a tokenizer's batch of one, as `return_tensors` gives it
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
        raise DataError(f"{row.where}: {key!r} must be a list of token ids, got {str(value)[:80]}")
    return [int(i) for i in listed]


def as_item(prompt: Prompt, row: Mapping[str, Any], *, length: int, pad: int) -> dict[str, Any]:
    """A prompt as VERL's `RLHFDataset` gives it, with all columns of its `row`.

    `input_ids`, `attention_mask`, `position_ids` (length,) are padded on the left;
    `raw_prompt_ids` are not. `index`, `tools_kwargs` and `interaction_kwargs` are the
    `extra_info`'s.
    """
    ids = torch.full((length,), pad, dtype=torch.long)
    there = torch.zeros(length, dtype=torch.long)
    start = length - len(prompt.ids)
    ids[start:] = torch.tensor(prompt.ids, dtype=torch.long)
    there[start:] = 1
    extra = row.get("extra_info") or {}
    return {
        **row,
        "input_ids": ids,
        "attention_mask": there,
        "position_ids": (there.cumsum(0) - 1).clamp(min=0),
        "raw_prompt_ids": RenderedIds(prompt),
        "raw_prompt": prompt.messages,
        **{key: extra.get(key, empty) for key, empty in _EMPTY.items()},
        "uid": prompt.uid,
    }
