"""Prompts from dataset files in VERL's row schema.

    data_source   which reward rule applies
    prompt        a list of chat messages, or plain text (used as it is, without a chat template)
    ability, reward_model.ground_truth, extra_info.index ...
    images, videos  only for models with a processor

Knows files and tokenizers, not order, epochs or rewards. Called by `build.parts` and data checks.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from slipstream.data.rows import (
    DataRow,
    as_messages,
    ground_truth_of,
    mapping,
    missing_column,
    read_rows,
    subset,
)
from slipstream.errors import ConfigError, DataError
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[Truncation, ...] = ("error", "left", "right", "middle")

_MEDIA = {"images": "<image>", "videos": "<video>"}
_KNOWN_COLUMNS = {"ability", "reward_model", "extra_info", *_MEDIA}
_NAMED = 5  # how many bad rows a message names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts, their rows, and what was left out: how many overlong ones, and rows whose template
    failed and why."""

    prompts: list[Prompt]
    filtered: int = 0
    failed: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)

    def warn(self, max_prompt_length: int) -> None:
        """Log what was left out, if anything was."""
        if self.filtered:
            log.warning(
                "%d prompts longer than data.max_prompt_length %d tokens were left out, %d remain",
                self.filtered,
                max_prompt_length,
                len(self.prompts),
            )
        if self.failed:
            log.warning("%s", _failures(self.failed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """How rows become prompts.

    `max_prompt_length` is in tokens, tool schemas counted. A longer prompt is left out with
    `filter_overlong`; else `truncation` keeps its tail (`left`), head (`right`), both ends
    (`middle`: half head, half tail) or refuses it (`error`). A row whose chat template fails on its
    content is left out and named. Raises `ConfigError` for an unknown `truncation`, and for no
    length at all.
    """

    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    truncation: Truncation = "error"
    filter_overlong: bool = True
    processor: Any = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise ConfigError(
                f"data.truncation {self.truncation!r} is unknown; use {', '.join(TRUNCATIONS)}"
            )
        if self.max_prompt_length < 1:
            raise ConfigError(f"data.max_prompt_length {self.max_prompt_length} must be at least 1")

    def read(self, rows: Sequence[DataRow]) -> LoadedPrompts:
        """The prompts of `rows` that are not left out, truncated. May be none."""
        return self.keep((row, row.where, partial(self.prompt, row)) for row in rows)

    def keep(self, rows: Iterable[tuple[Any, str, Callable[[], Prompt]]]) -> LoadedPrompts:
        """As `read`, of rows that are each a row, how messages name it, and what renders it."""
        loaded = LoadedPrompts([])
        filtered = 0
        for row, where, render in rows:
            try:
                prompt = render()
            except jinja2.TemplateError as error:
                loaded.failed.append(f"{where} ({type(error).__name__}: {error})")
                continue
            if not prompt.ids:
                raise DataError(f"{where}: the prompt has no tokens")
            if len(prompt.ids) > self.max_prompt_length and self.filter_overlong:
                filtered += 1
                continue
            self.truncate(prompt, where)
            loaded.prompts.append(prompt)
            loaded.rows.append(row)
        return replace(loaded, filtered=filtered)

    def truncate(self, prompt: Prompt, where: str) -> None:
        """Cut the prompt in place, if it is too long. Raises `DataError` where it must not be."""
        limit = self.max_prompt_length
        if prompt.multi_modal and len(prompt.ids) > limit and self.truncation != "error":
            raise DataError(
                f"{where}: a prompt with images or videos cannot be truncated ({len(prompt.ids)} "
                f"tokens, data.max_prompt_length {limit}): its placeholders would not "
                "match. Set data.filter_overlong_prompts=true or raise the limit"
            )
        prompt.ids = truncate_ids(prompt.ids, limit, self.truncation, where=where)

    def prompt(self, row: DataRow) -> Prompt:
        """The whole prompt of one row. Raises `DataError` for one outside the schema, and what its
        chat template raises."""
        if row.values.get(self.prompt_key) is None:
            raise missing_column(row, self.prompt_key, "data.prompt_key")
        raw = row.values[self.prompt_key]
        messages = raw if isinstance(raw, str) else as_messages(row, self.prompt_key)
        media = {key: row.values[key] for key in _MEDIA if row.values.get(key)}
        if media and self.processor is None:
            raise DataError(
                f"{row.where} has {' and '.join(media)}, but the model has no processor for them: "
                "use a model with one, or a dataset without these columns"
            )
        if media:
            ids = self._multi_modal_ids(row, messages, media)
        else:
            ids = self.text_ids(messages, row.where)
        return Prompt(
            uid=row.uid,
            ids=ids,
            messages=messages,
            data_source=str(row.values.get(self.reward_fn_key) or ""),
            ground_truth=ground_truth_of(row),
            extra_info=self._extra_info(row),
            ability=str(row.values.get("ability") or ""),
            multi_modal=media or None,
        )

    def text_ids(self, messages: str | list[Message], where: str) -> list[int]:
        """Plain text as it is, messages through the chat template."""
        if isinstance(messages, str):
            return [int(i) for i in self.tokenizer(messages)["input_ids"]]
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat "
                "template: set actor_rollout_ref.model.custom_chat_template, or give the prompts "
                "as plain text"
            )
        ids = self.tokenizer.apply_chat_template(
            messages,
            tools=list(self.tools) if self.tools else None,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **self.template_kwargs,
        )
        return [int(i) for i in ids]

    def _multi_modal_ids(
        self, row: DataRow, messages: str | list[Message], media: dict[str, list[Any]]
    ) -> list[int]:
        if isinstance(messages, str):
            raise DataError(
                f"{row.where} has {' and '.join(media)}, so its prompt must be a list of messages "
                "with <image> and <video> where they belong"
            )
        text = self.processor.apply_chat_template(
            _expand_placeholders(row, messages, media),
            tokenize=False,
            add_generation_prompt=True,
            **self.template_kwargs,
        )
        loaded = {key: [_open_media(value) for value in values] for key, values in media.items()}
        return [int(i) for i in self.processor(text=[text], **loaded)["input_ids"][0]]

    def _extra_info(self, row: DataRow) -> dict[str, Any]:
        """The row's `extra_info`, and columns that the schema does not name beside it."""
        known = _KNOWN_COLUMNS | {self.prompt_key, self.reward_fn_key}
        others = {k: v for k, v in row.values.items() if k not in known and v is not None}
        return {**others, **mapping(row, "extra_info")}


def load_prompts(
    files: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int = -1,
    seed: int | None = None,
    **options: Any,
) -> list[Prompt]:
    """The prompts of `inspect_prompts`; what was left out is logged as a warning.

    `options` are those of `PromptReader`; `max_prompt_length` must be given.
    """
    reader = PromptReader(tokenizer=tokenizer, **options)
    loaded = inspect_prompts(files, reader, max_samples=max_samples, seed=seed)
    loaded.warn(reader.max_prompt_length)
    return loaded.prompts


def inspect_prompts(
    files: str | Path | Sequence[str | Path],
    reader: PromptReader,
    *,
    max_samples: int = -1,
    seed: int | None = None,
) -> LoadedPrompts:
    """Read, render and tokenise the prompts of parquet, JSONL or JSON files, or of folders that
    `datasets` has saved, in file order.

    `max_samples` rows are read: the first ones, or with `seed` a random choice. Raises `DataError`
    naming file, row and setting for rows outside the schema, and where no prompt is left.
    """
    rows = subset(read_rows(files), max_samples=max_samples, seed=seed)
    loaded = reader.read(rows)
    if not loaded.prompts:
        raise none_left(loaded, reader.max_prompt_length)
    return loaded


def none_left(loaded: LoadedPrompts, max_prompt_length: int) -> DataError:
    """The error for a data set of which everything was left out."""
    return DataError(
        f"no prompt is left: {loaded.filtered} longer than data.max_prompt_length "
        f"{max_prompt_length} tokens. {_failures(loaded.failed)}"
    )


def truncate_ids(
    ids: list[int], max_length: int, truncation: Truncation, *, where: str = "prompt"
) -> list[int]:
    """At most `max_length` of `ids`; see `PromptReader` for the modes."""
    if len(ids) <= max_length:
        return ids
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "right":
        return ids[:max_length]
    if truncation == "middle":
        head = max_length // 2
        return ids[:head] + ids[len(ids) - (max_length - head) :]
    raise DataError(
        f"{where}: {len(ids)} tokens are more than data.max_prompt_length {max_length}: raise it, "
        "set data.filter_overlong_prompts=true, or set data.truncation to left, right or middle"
    )


def _failures(failed: Sequence[str]) -> str:
    if not failed:
        return "No chat template failed."
    more = f", and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return (
        f"The chat template failed on {len(failed)} rows, which were left out: "
        f"{', '.join(failed[:_NAMED])}{more}"
    )


def _expand_placeholders(
    row: DataRow, messages: list[Message], media: dict[str, list[Any]]
) -> list[Message]:
    """Replace `<image>` and `<video>` in message text by content parts, and check their counts."""
    kinds = {mark: key for key, mark in _MEDIA.items()}
    found = dict.fromkeys(_MEDIA, 0)
    out = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            parts = []
            for part in re.split(f"({'|'.join(kinds)})", content):
                if part in kinds:
                    found[kinds[part]] += 1
                    parts.append({"type": part.strip("<>")})
                elif part:
                    parts.append({"type": "text", "text": part})
            message = {**message, "content": parts}
        out.append(message)
    for key, mark in _MEDIA.items():
        given = len(media.get(key, []))
        if found[key] != given:
            raise DataError(
                f"{row.where}: {given} {key} but {found[key]} {mark} placeholders in the prompt"
            )
    return out


def _open_media(value: Any) -> Any:
    """Parquet stores pictures as `{"bytes": ..., "path": ...}`; processors want images or paths."""
    if not isinstance(value, dict):
        return value
    if value.get("bytes") is not None:
        from PIL import Image

        return Image.open(io.BytesIO(value["bytes"]))
    return value.get("path") or value.get("image") or value.get("video")
