"""Built-in tasks by name.

Called by `loops.build` with the options of the configuration; knows no task's rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, Protocol

from slipstream.environment.countdown import CountdownTask
from slipstream.errors import ConfigError, did_you_mean
from slipstream.types import Message, Prompt


class Task(Protocol):
    """An endless, seeded task: prompts, and demonstrations to imitate first."""

    name: str

    def prompt(self, split: Literal["train", "held_out"], index: int) -> Prompt: ...

    def demonstration(
        self, split: Literal["train", "held_out"], index: int, *, variant: int = 0
    ) -> list[Message]: ...

    def parameters(self) -> dict[str, Any]: ...

    def max_prompt_tokens(self) -> int: ...

    def max_response_tokens(self) -> int: ...


_TASKS: dict[str, Callable[..., Task]] = {CountdownTask.name: CountdownTask}


def register_task(name: str, factory: Callable[..., Task]) -> None:
    """Add a task; `factory(seed, **options)` builds it. Raises `ConfigError` for a taken name."""
    if name in _TASKS:
        raise ConfigError(f"task {name!r} exists already; choose another name")
    _TASKS[name] = factory


def task_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_TASKS)


def get_task(name: str, seed: int = 0, *, tokenizer: Any = None, **options: Any) -> Task:
    """Build the task `name`. Raises `ConfigError` for unknown names and options, with near ones.

    `tokenizer` goes to tasks whose factory takes one: it renders their prompts.
    """
    factory = _TASKS.get(name)
    if factory is None:
        raise ConfigError(f"unknown task {name!r}{_near(name, task_names())}")
    accepted = [p for p in inspect.signature(factory).parameters if p != "seed"]
    for option in options:
        if option not in accepted:
            known = [p for p in accepted if p != "tokenizer"]
            raise ConfigError(f"task {name!r} has no option {option!r}{_near(option, known)}")
    if tokenizer is not None and "tokenizer" in accepted:
        options["tokenizer"] = tokenizer
    return factory(seed, **options)


def _near(word: str, known: list[str]) -> str:
    return f"{did_you_mean(word, known)} (known: {', '.join(sorted(known))})"
