"""Built-in tasks by name.

Called by `build.parts` with the options of the configuration. Knows nothing of a task's rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream.data import lookup
from slipstream.data.countdown import CountdownTask
from slipstream.data.gym import ReasoningGymTask
from slipstream.data.lookup import LookupTask
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import ConfigError, did_you_mean, name_of
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Task(Protocol):
    """An endless, seeded task with prompts, and demonstrations for SFT."""

    name: str

    def prompt(self, split: Literal["train", "held_out"], index: int) -> Prompt: ...

    def demonstration(
        self, split: Literal["train", "held_out"], index: int, *, variant: int = 0
    ) -> list[Message]: ...

    def parameters(self) -> dict[str, Any]: ...

    def max_prompt_tokens(self) -> int: ...


_TASKS: dict[str, Callable[..., Task]] = {
    CountdownTask.name: CountdownTask,
    LookupTask.name: LookupTask,
    ReasoningGymTask.name: ReasoningGymTask,
}


_TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    LookupTask.name: lookup.build_tokenizer
}
"""Tokenizers of tasks that do not use the countdown task's."""


def task_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer for a model with random weights that learns the task `name`."""
    return _TOKENIZERS.get(name, build_tokenizer)()


def register_task(name: str | Enum, factory: Callable[..., Task]) -> None:
    """Register a task. `factory(seed, **options)` builds it. Raises ConfigError for a used name."""
    key = name_of(name, "task")
    if key in _TASKS:
        raise ConfigError(f"task {key!r} already exists; choose another name")
    _TASKS[key] = factory


def task_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_TASKS)


_RUN_ARGUMENTS = ("seed", "tokenizer", "max_prompt_length")
"""Arguments that the run passes to a task's factory if it has such parameters."""


def get_task(
    name: str | Enum,
    seed: int = 0,
    *,
    tokenizer: Any = None,
    max_prompt_length: int | None = None,
    **options: Any,
) -> Task:
    """Build the task `name`.

    `tokenizer`, which renders prompts, and `max_prompt_length` are passed to the factory if it has
    such parameters. Raises ConfigError, with similar names, for unknown names and options, and for
    a missing option.
    """
    name = name_of(name, "task")
    factory = _TASKS.get(name)
    if factory is None:
        raise ConfigError(f"unknown task {name!r}{_near(name, task_names())}")
    signature = inspect.signature(factory)
    known = [p for p in signature.parameters if p not in _RUN_ARGUMENTS]
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name!r} has no option {option!r}{_near(option, known)}")
    for argument, value in (("tokenizer", tokenizer), ("max_prompt_length", max_prompt_length)):
        if value is not None and argument in signature.parameters:
            options[argument] = value
    for option in known:
        required = signature.parameters[option].default is inspect.Parameter.empty
        if required and option not in options:
            raise ConfigError(
                f"task {name!r} needs the option {option!r}; set data.task_kwargs.{option}"
            )
    return factory(seed, **options)


def _near(word: str, known: list[str]) -> str:
    return f"{did_you_mean(word, known)} (known: {', '.join(sorted(known))})"
