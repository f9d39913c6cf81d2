"""Environments written for TRL's `environment_factory`.

    class Game:
        def reset(self, **row) -> str | None: ...    text to add to the prompt
        def guess(self, number: int) -> str: ...     public methods are tools
        def get_reward(self) -> float: ...           optional

Each episode has an object of its own, which is used again for later episodes, as in TRL.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.environment.protocol import Answer, InfrastructureError, Start, Turn
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment, ToolLimits
from slipstream.environment.tools.function import FunctionTool, call_either, function_schema
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


class TrlFactory:
    """Makes environments of a TRL class, and keeps their objects for later episodes."""

    def __init__(self, make: Callable[[], Any], limits: ToolLimits) -> None:
        """`make` returns an object. Raises ConfigError for a method without type hints or
        docstring."""
        self._make = make
        self._limits = limits
        self._free: list[Any] = []
        first = make()
        cls = type(first)
        self._schemas = {name: function_schema(getattr(first, name)) for name in _tool_names(cls)}
        if not self._schemas:
            raise ConfigError(
                f"{cls.__name__} has no public method besides reset and get_reward, so there is no "
                "tool; define one with type hints and a docstring"
            )
        self._free.append(first)
        self.gives_reward = callable(getattr(first, "get_reward", None))
        """Whether the environment scores its episodes."""
        self.schemas = list(self._schemas.values())
        """The tools of every episode."""

    def __call__(self) -> TrlEnvironment:
        """Return the environment of a new episode."""
        held = self._free.pop() if self._free else self._make()
        tools = [
            FunctionTool.of(getattr(held, name), schema=schema, parallel=False)
            for name, schema in self._schemas.items()
        ]
        return TrlEnvironment(held, Toolbox(tools, self._limits), self._free.append)


class TrlEnvironment:
    """An `Environment` of one object."""

    def __init__(self, held: Any, toolbox: Toolbox, release: Callable[[Any], None]) -> None:
        self._held = held
        self._tools = ToolEnvironment(toolbox)
        self._release = release

    async def reset(self, row: Prompt, seed: int) -> Start:
        start = await self._tools.reset(row, seed)
        text = await call_either(self._held.reset, **_columns(row))
        return Start(prompt_text=_text(text), tools=start.tools)

    async def step(self, turn: Turn) -> Answer:
        return await self._tools.step(turn)

    async def score(self) -> Mapping[str, float]:
        get_reward = getattr(self._held, "get_reward", None)
        if get_reward is None:
            return {}
        return {type(self._held).__name__: float(await call_either(get_reward))}

    async def close(self) -> None:
        await self._tools.close()
        self._release(self._held)


def _columns(row: Prompt) -> dict[str, Any]:
    """The columns of a row, as TRL passes them to `reset`."""
    return {
        **copy.deepcopy(row.extra_info),
        "prompt": copy.deepcopy(row.messages),
        "data_source": row.data_source,
        "ground_truth": row.ground_truth,
    }


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
    raise InfrastructureError(
        f"reset must return None, a text or a list of texts, not {type(found).__name__}"
    )
