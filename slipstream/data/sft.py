"""Supervised fine-tuning samples, from files or from an endless task.

Pure functions; knows nothing of batching or training. Called by the SFT loop, and by the command
line for data checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream.data.conversation import (
    SFTTruncation,
    TokenizedConversation,
    TurnSpan,
    compute_loss_mask,
    tokenize_conversation,
    tokenize_text_pair,
)
from slipstream.data.rows import DataRow, as_messages, null_column, read_rows, subset
from slipstream.errors import DataError
from slipstream.reading import reading
from slipstream.types import Message, Sample, Segment, Status, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "SFTSource",
    "SFTTruncation",
    "TokenizedConversation",
    "TurnSpan",
    "compute_loss_mask",
    "conversation_sample",
    "load_sft_samples",
    "sft_samples",
    "tokenize_conversation",
    "tokenize_text_pair",
]


class SFTSource(Protocol):
    """An endless source of demonstrations, addressed by index, such as the countdown task."""

    name: str

    def demonstration(
        self, split: Literal["train", "held_out"], index: int, *, variant: int = 0
    ) -> list[Message]:
        """Return the conversation at `index`. Equal arguments always give the same one."""
        ...


def conversation_sample(
    messages: Sequence[Message],
    conversation: TokenizedConversation,
    *,
    uid: str = "",
    data_source: str = "",
    index: int = 0,
) -> Sample:
    """Return a `Sample` of a tokenized conversation, with one segment per span."""
    segments = []
    for span in conversation.spans:
        segment = Segment.given(span.role, conversation.ids[span.start : span.end])
        segment.loss_mask[:] = conversation.loss_mask[span.start : span.end]
        segments.append(segment)
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    last = next(m for m in reversed(messages) if m["role"] == "assistant")
    content = last.get("content")
    return Sample(
        prompt=[dict(m) for m in messages[:first]],
        segments=segments,
        response=content if isinstance(content, str) else "",
        status=Status.COMPLETED,
        stop_reason=StopReason.EOS,
        uid=uid,
        index=index,
        data_source=data_source,
    )


def sft_samples(
    task: SFTSource,
    tokenizer: PreTrainedTokenizerBase,
    start: int,
    count: int,
    *,
    split: Literal["train", "held_out"] = "train",
    max_length: int | None = None,
    truncation: SFTTruncation = "error",
) -> Iterator[Sample]:
    """Yield demonstrations `start` to `start + count - 1` of an endless task, tokenized lazily."""
    for index in range(start, start + count):
        messages = task.demonstration(split, index)
        conversation = tokenize_conversation(
            messages, tokenizer, max_length=max_length, truncation=truncation
        )
        yield conversation_sample(
            messages,
            conversation,
            uid=f"{task.name}/sft/{split}/{index}",
            data_source=task.name,
            index=index,
        )


def load_sft_samples(
    files: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
    response_key: str = "response",
    wrap_prompts: bool = False,
    tools_key: str = "tools",
    enable_thinking_key: str = "enable_thinking",
    max_length: int | None = None,
    truncation: SFTTruncation = "error",
    max_samples: int = -1,
    seed: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    ignore_input_ids_mismatch: bool = False,
) -> list[Sample]:
    """Return the conversations of parquet, JSONL or JSON files as samples.

    A row has either a column `messages_key` with the whole conversation, or the columns
    `prompt_key` and `response_key` (text). `a.b` is the entry `b` of the column `a`. A prompt that
    is plain text is a user message if `wrap_prompts`. Otherwise it is used without a chat template,
    and the response ends with the end-of-sequence token. Assistant messages in a prompt have no
    loss, unless they have a `loss_mask` of 1. The columns `tools_key` and
    `enable_thinking_key`, if present, are passed to the chat template. At most `max_samples` rows
    (-1: all) are used: the first ones, or with `seed` a random choice. Raises DataError that names
    file, row and setting.
    """

    def tokenize(row: DataRow) -> tuple[list[Message], TokenizedConversation]:
        pair = _text_pair(row, messages_key, prompt_key, response_key)
        messages: list[Message] = []
        if pair is not None:
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
        if pair is not None and not wrap_prompts:
            return messages, tokenize_text_pair(
                *pair, tokenizer, max_length=max_length, truncation=truncation
            )
        messages = messages or _row_messages(row, messages_key, prompt_key, response_key)
        return messages, tokenize_conversation(
            messages,
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            tools=row.values.get(tools_key),
            template_kwargs=_template_kwargs(row, template_kwargs, enable_thinking_key),
            ignore_input_ids_mismatch=ignore_input_ids_mismatch,
        )

    samples = []
    for row in subset(read_rows(files), max_samples=max_samples, seed=seed):
        try:
            with reading(row.where, DataError, "check the conversation in this row"):
                messages, conversation = tokenize(row)
        except DataError as error:
            text = str(error)
            raise DataError(text if row.where in text else f"{row.where}: {text}") from error
        samples.append(
            conversation_sample(
                messages,
                conversation,
                uid=row.uid,
                data_source=str(row.values.get("data_source") or ""),
                index=row.number,
            )
        )
    return samples


def _template_kwargs(
    row: DataRow, common: Mapping[str, Any] | None, enable_thinking_key: str
) -> dict[str, Any]:
    """Return the template options; the row's `enable_thinking` overrides the common options."""
    thinking = row.values.get(enable_thinking_key)
    if thinking is None:
        return dict(common or {})
    if not isinstance(thinking, bool):
        raise DataError(
            f"{row.where}: column {enable_thinking_key!r} must be true or false, got {thinking!r}"
        )
    return {**(common or {}), "enable_thinking": thinking}


def _entry(row: DataRow, key: str) -> Any:
    """Return the column `key`, or for `a.b` the entry `b` of the column `a`; None without it."""
    if key in row.values:
        return row.values[key]
    value: Any = row.values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text_pair(
    row: DataRow, messages_key: str, prompt_key: str, response_key: str
) -> tuple[str, str] | None:
    """Return prompt and response if both are plain text, else None."""
    if row.values.get(messages_key) is not None:
        return None
    prompt, response = _entry(row, prompt_key), _entry(row, response_key)
    return (prompt, response) if isinstance(prompt, str) and isinstance(response, str) else None


def _row_messages(
    row: DataRow, messages_key: str, prompt_key: str, response_key: str
) -> list[Message]:
    if row.values.get(messages_key) is not None:
        return as_messages(row, messages_key)
    if messages_key in row.values and prompt_key not in row.values:
        raise null_column(row, messages_key)
    for key in (prompt_key, response_key):
        if _entry(row, key) is None:
            if key in row.values:
                raise null_column(row, key)
            raise DataError(
                f"{row.where} has no column {key!r} (columns found: {', '.join(row.values)}): a "
                f"row needs {messages_key!r} with a conversation, or {prompt_key!r} and "
                f"{response_key!r}. Set sft.messages_key, or sft.prompt_key and sft.response_key"
            )
    response = _entry(row, response_key)
    if not isinstance(response, str):
        raise DataError(
            f"{row.where}: column {response_key!r} must be text, got {type(response).__name__}; "
            f"put whole conversations into a column {messages_key!r}"
        )
    found = replace(row, values={**row.values, prompt_key: _entry(row, prompt_key)})
    prompt = as_messages(found, prompt_key)
    # As in TRL and verl, only the response has loss.
    given = [m if m["role"] != "assistant" else {"loss_mask": 0, **m} for m in prompt]
    return [*given, {"role": "assistant", "content": response}]
