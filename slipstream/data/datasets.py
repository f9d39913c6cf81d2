"""Reads prompts from data set files in verl's row schema.

    data_source   selects the reward function
    prompt        a list of chat messages, or plain text (used without a chat template)
    ability, reward_model.ground_truth, extra_info.index ...
    images, videos  refused where a row has any: models here read text

Knows files and tokenizers, not order, epochs or rewards. Called by `build.parts` and data checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from slipstream.data.chat_template import ChatTemplateError, apply_chat_template
from slipstream.data.messages import continues_message
from slipstream.data.rows import (
    DataRow,
    as_messages,
    ground_truth_of,
    mapping,
    missing_column,
    read_rows,
    subset,
)
from slipstream.data.template_check import check_conversation_renders
from slipstream.errors import ConfigError, DataError
from slipstream.reading import reading, reason
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[Truncation, ...] = ("error", "left", "right", "middle")

_MEDIA = ("images", "videos")
_KNOWN_COLUMNS = {"ability", "reward_model", "extra_info", *_MEDIA}
_FIXED_OPTIONS = {
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
}
"""Options of `apply_chat_template` that are not variables of a template."""
_SINGLE_TURN = "single_turn_agent"
_NAMED = 5  # how many bad rows an error message lists

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts and their rows, and what was left out.

    `filtered` is the number of overlong prompts; `failed` lists rows whose chat template failed.
    `with_tools` is the number of prompts whose rows ask for tools or further turns.
    """

    prompts: list[Prompt]
    filtered: int = 0
    with_tools: int = 0
    failed: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)

    def warn(self, max_prompt_length: int, *, tools: bool = False) -> None:
        """Log a warning if rows were left out, continue a message, or ask for tools that the run
        does not have (`tools`)."""
        if self.filtered:
            log.warning(
                "%d prompts longer than data.max_prompt_length %d tokens were left out, %d remain",
                self.filtered,
                max_prompt_length,
                len(self.prompts),
            )
        if self.failed:
            log.warning("%s", _failures(self.failed))
        if continued := sum(continues_message(prompt.messages) for prompt in self.prompts):
            log.warning(
                "%d of %d prompts end with an assistant message: responses continue that message, "
                "and rewards get only the continuation",
                continued,
                len(self.prompts),
            )
        if self.with_tools and not tools:
            log.warning(
                "%d of %d rows ask for tools or further turns (agent_name, tools_kwargs, "
                "interaction_kwargs), but the run has none, so every response is a single turn; "
                "set actor_rollout_ref.rollout.multi_turn.tool_config_path",
                self.with_tools,
                len(self.prompts),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Converts rows to prompts.

    `max_prompt_length` is in tokens, including tool schemas. A longer prompt is left out if
    `filter_overlong`. Otherwise `truncation` keeps its end (`left`), its start (`right`) or half of
    each (`middle`), or raises (`error`). A row whose chat template fails is left out and listed.
    Raises ConfigError for an unknown `truncation`, and for a length below 1.
    """

    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    truncation: Truncation = "error"
    filter_overlong: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise ConfigError(
                f"data.truncation {self.truncation!r} is unknown; use {', '.join(TRUNCATIONS)}"
            )
        if self.max_prompt_length < 1:
            raise ConfigError(f"data.max_prompt_length {self.max_prompt_length} must be at least 1")
        if fixed := sorted(_FIXED_OPTIONS & set(self.template_kwargs)):
            raise ConfigError(
                f"data.apply_chat_template_kwargs must not contain {', '.join(fixed)}: the run "
                "sets these itself; remove them"
            )

    def read(self, rows: Sequence[DataRow]) -> LoadedPrompts:
        """Return the prompts of `rows`, truncated, without those left out. It may be empty."""
        return self.keep((row, row.where, partial(self.prompt, row)) for row in rows)

    def keep(self, rows: Iterable[tuple[Any, str, Callable[[], Prompt]]]) -> LoadedPrompts:
        """Like `read`, for tuples of a row, its name in messages, and a function to render it."""
        loaded = LoadedPrompts([])
        filtered = with_tools = 0
        for row, where, render in rows:
            try:
                prompt = render()
            except (ChatTemplateError, jinja2.TemplateError) as error:
                cause = error.__cause__ if isinstance(error, ChatTemplateError) else error
                loaded.failed.append(f"{where} ({type(cause).__name__}: {_without_type(cause)})")
                continue
            if not prompt.ids:
                raise DataError(f"{where}: the prompt has no tokens")
            if len(prompt.ids) > self.max_prompt_length and self.filter_overlong:
                filtered += 1
                continue
            self.truncate(prompt, where)
            with_tools += asks_for_tools(prompt.extra_info)
            loaded.prompts.append(prompt)
            loaded.rows.append(row)
        return replace(loaded, filtered=filtered, with_tools=with_tools)

    def truncate(self, prompt: Prompt, where: str) -> None:
        """Truncate a prompt in place if it is too long. Raises DataError if that is not allowed."""
        prompt.ids = truncate_ids(prompt.ids, self.max_prompt_length, self.truncation, where=where)

    def prompt(self, row: DataRow) -> Prompt:
        """Return the whole prompt of one row.

        Raises DataError if the row does not follow the schema, and errors of its chat template.
        """
        if row.values.get(self.prompt_key) is None:
            raise missing_column(row, self.prompt_key, "data.prompt_key")
        raw = row.values[self.prompt_key]
        messages = raw if isinstance(raw, str) else as_messages(row, self.prompt_key)
        if media := [key for key in _MEDIA if row.values.get(key)]:
            raise DataError(
                f"{row.where} has {' and '.join(media)}, and models here read text only: use a "
                "data set without these columns"
            )
        return Prompt(
            uid=row.uid,
            ids=self.text_ids(messages, row.where),
            messages=messages,
            data_source=str(row.values.get(self.reward_fn_key) or ""),
            ground_truth=ground_truth_of(row),
            extra_info=self._extra_info(row),
            ability=str(row.values.get("ability") or ""),
        )

    def text_ids(self, messages: str | list[Message], where: str) -> list[int]:
        """Return token ids: of plain text as it is, of messages with the chat template.

        If the last message is one of the assistant, the response continues it.
        """
        if isinstance(messages, str):
            with reading(where, DataError, "check the text of the prompt"):
                return [int(i) for i in self.tokenizer(messages)["input_ids"]]
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat "
                "template: set actor_rollout_ref.model.custom_chat_template, or give the prompts "
                "as plain text"
            )
        check_conversation_renders(
            self.tokenizer,
            messages,
            where,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
        )
        continues = continues_message(messages)
        if continues and messages[-1].get("tool_calls"):
            raise DataError(
                f"{where}: the prompt ends with an assistant message that calls tools, which no "
                "response can continue; remove the message, or add the tool's answer"
            )
        ids = apply_chat_template(
            self.tokenizer,
            messages,
            tools=list(self.tools) if self.tools else None,
            tokenize=True,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            return_dict=False,
            **self.template_kwargs,
        )
        return [int(i) for i in ids]

    def _extra_info(self, row: DataRow) -> dict[str, Any]:
        """Return the row's `extra_info`, plus all columns outside the schema."""
        known = _KNOWN_COLUMNS | {self.prompt_key, self.reward_fn_key}
        others = {k: v for k, v in row.values.items() if k not in known and v is not None}
        return {**others, **mapping(row, "extra_info")}


def asks_for_tools(extra_info: Mapping[str, Any]) -> bool:
    """Return whether a row of verl's schema asks for an agent loop, tools or an interaction."""
    agent = extra_info.get("agent_name") or _SINGLE_TURN
    asked = [extra_info.get(key) for key in ("tools_kwargs", "interaction_kwargs")]
    # Parquet gives every row all keys of all rows; missing ones are None.
    given = [value for value in asked if isinstance(value, Mapping) and any(value.values())]
    return agent != _SINGLE_TURN or bool(extra_info.get("need_tools_kwargs")) or bool(given)


def load_prompts(
    files: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int = -1,
    seed: int | None = None,
    **options: Any,
) -> list[Prompt]:
    """Return the prompts of data files (see `inspect_prompts`), and log what was left out.

    `options` are the fields of `PromptReader`; `max_prompt_length` is required.
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
    """Read, render and tokenize the prompts of data files, in file order.

    `files` are parquet, JSONL or JSON files, or folders written by `datasets`. At most
    `max_samples` rows (-1: all) are used: the first ones, or with `seed` a random choice. Raises
    DataError, naming file, row and setting, for rows outside the schema, and if no prompt is left.
    """
    rows = subset(read_rows(files), max_samples=max_samples, seed=seed)
    loaded = reader.read(rows)
    if not loaded.prompts:
        raise none_left(loaded, reader.max_prompt_length)
    return loaded


def none_left(loaded: LoadedPrompts, max_prompt_length: int) -> DataError:
    """Return the error for a data set whose rows were all left out."""
    return DataError(
        f"no prompt is left: {loaded.filtered} longer than data.max_prompt_length "
        f"{max_prompt_length} tokens. {_failures(loaded.failed)}"
    )


def truncate_ids(
    ids: list[int], max_length: int, truncation: Truncation, *, where: str = "prompt"
) -> list[int]:
    """Return at most `max_length` of `ids`. `PromptReader` explains the modes."""
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


def _without_type(error: BaseException | None) -> str:
    if error is None:
        return ""
    return reason(error).removeprefix(f"{type(error).__name__}: ")


def _failures(failed: Sequence[str]) -> str:
    if not failed:
        return "No chat template failed."
    more = f", and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return (
        f"The chat template failed on {len(failed)} rows, which were left out: "
        f"{', '.join(failed[:_NAMED])}{more}"
    )
