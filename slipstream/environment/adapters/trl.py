"""Environments written for TRL's `environment_factory`.

    class Game:
        def reset(self, **row) -> str | None: ...    text to add to the prompt
        def guess(self, number: int) -> str: ...     public methods are tools
        def get_reward(self) -> float: ...           optional

No two running episodes share an object. After an episode, its object is used again, as in TRL,
unless something went wrong in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slipstream.environment.adapters.columns import columns_of
from slipstream.environment.protocol import Answer, CallProblem, Start, Turn, within
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment, ToolLimits
from slipstream.environment.tools.function import (
    FunctionTool,
    accepted,
    call_either,
    function_schema,
)
from slipstream.errors import ConfigError
from slipstream.types import Prompt

_NO_TOOLS = ("reset", "get_reward")


def is_trl_environment(cls: Any) -> bool:
    """Return whether a class has TRL's form: a method `reset`, public methods, and no `step`."""
    return (
        inspect.isclass(cls)
        and callable(getattr(cls, "reset", None))
        and not hasattr(cls, "step")
        and bool(_tool_names(cls))
    )


def _tool_names(cls: Any) -> list[str]:
    """The public methods that are tools, in the order of definition."""
    found: dict[str, None] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= dict.fromkeys(
            name
            for name, value in vars(base).items()
            if inspect.isfunction(value) and not name.startswith("_") and name not in _NO_TOOLS
        )
    return list(found)


TIMEOUT_S = 600.0
"""Time limit of the constructor, `reset`, a method and `get_reward`, in seconds."""


class TrlFactory:
    """Makes environments of a TRL class, and keeps their objects for later episodes."""

    def __init__(self, make: Callable[[], Any], limits: ToolLimits) -> None:
        """`make` returns an object. Raises ConfigError for a method without type hints or
        docstring."""
        self._make = make
        self._limits = limits
        first = make()
        cls = type(first)
        self._schemas = {name: function_schema(getattr(first, name)) for name in _tool_names(cls)}
        if not self._schemas:
            raise ConfigError(
                f"{cls.__name__} has no public method besides reset and get_reward, so there is no "
                "tool; define one with type hints and a docstring"
            )
        self._free: list[Any] = [first]
        self.gives_reward = callable(getattr(first, "get_reward", None))
        """Whether the environment scores its episodes."""
        self.schemas = list(self._schemas.values())
        """The tools of every episode."""

    def __call__(self) -> TrlEnvironment:
        """Return the environment of a new episode."""
        return TrlEnvironment(self)

    async def take(self) -> tuple[Any, Toolbox]:
        """Return an object that no episode uses, and its tools."""
        held = self._free.pop() if self._free else await call_either(self._make)
        tools = [
            FunctionTool.of(getattr(held, name), schema=schema, parallel=False, timeout_s=TIMEOUT_S)
            for name, schema in self._schemas.items()
        ]
        return held, Toolbox(tools, self._limits)

    def give_back(self, held: Any) -> None:
        """Keep an object for later episodes."""
        self._free.append(held)


class TrlEnvironment:
    """An `Environment` of one object."""

    def __init__(self, factory: TrlFactory) -> None:
        self._factory = factory
        self._held: Any = None
        self._tools: ToolEnvironment | None = None
        self._is_usable = True
        """False if a call may still run in a thread, or failed: the object is not used again."""

    async def reset(self, row: Prompt, seed: int) -> Start:
        self._is_usable = False
        if self._tools is None:
            self._held, toolbox = await within(TIMEOUT_S, "constructor", self._factory.take)
            self._tools = ToolEnvironment(toolbox)
        start = await self._tools.reset(row, seed)
        columns = accepted(self._held.reset, columns_of(row))
        reset = partial(call_either, self._held.reset, **columns)
        text = _text(await within(TIMEOUT_S, "reset", reset))
        self._is_usable = True
        return Start(prompt_text=text, tools=start.tools)

    async def step(self, turn: Turn) -> Answer:
        assert self._tools is not None
        usable, self._is_usable = self._is_usable, False
        answer = await self._tools.step(turn)
        late = any(call.problem is CallProblem.TIMEOUT for call in answer.calls)
        self._is_usable = usable and not late
        return answer

    async def score(self) -> Mapping[str, float]:
        get_reward = getattr(self._held, "get_reward", None)
        if get_reward is None:
            return {}
        self._is_usable = False
        reward = await within(TIMEOUT_S, "get_reward", partial(call_either, get_reward))
        self._is_usable = True
        return {type(self._held).__name__: float(reward)}

    async def close(self) -> None:
        if self._tools is not None and self._is_usable:
            self._factory.give_back(self._held)


def _text(found: Any) -> str:
    """The text that `reset` returned: None, a text, or a list of parts."""
    if found is None:
        return ""
    if isinstance(found, str):
        return found
    if isinstance(found, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in found]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise TypeError(
        f"reset must return None, a text or a list of texts, not {type(found).__name__}"
    )
