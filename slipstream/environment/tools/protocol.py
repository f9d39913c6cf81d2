"""The interface of tools."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.environment.protocol import ToolSchema
from slipstream.errors import ConfigError
from slipstream.reading import shown

TIMEOUT_S = 30.0
"""Default time limit of a call in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer to a call. `reward` is added to the reward of the turn. `metrics` are means over
    episodes in the log."""

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class ToolSession(Protocol):
    """The state of a tool in one episode."""

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer a call whose arguments fit the schema.

        An exception is answered with its text, as a mistake of the policy. Raises
        `InfrastructureError` for a failure that the policy did not cause.
        """
        ...

    async def score(self) -> float:
        """Return the reward of the whole episode, at its end."""
        ...

    async def close(self) -> None:
        """Release everything. Called exactly once."""
        ...


class Tool(Protocol):
    """A tool of a run. It makes one session per episode."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and parameters in OpenAI's form."""
        ...

    @property
    def timeout_s(self) -> float:
        """Time limit of a call in seconds. A later answer is not used."""
        ...

    @property
    def max_concurrent(self) -> int | None:
        """How many calls of all episodes may run at the same time; None: no limit."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether calls of one turn may run at the same time."""
        ...

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        """Begin an episode. `kwargs` are the row's `tools_kwargs` for this tool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolInfo:
    """The properties of a `Tool`, for its classes."""

    schema: ToolSchema
    timeout_s: float = TIMEOUT_S
    max_concurrent: int | None = None
    parallel: bool = True


def result_of(found: Any) -> ToolResult:
    """Return what a user's tool returned as a result: an answer, `(answer, reward)`, or `(answer,
    reward, metrics)`. An answer is a text, an object with `text`, or a JSON value.

    Raises ValueError for tuples of another length.
    """
    parts = found if isinstance(found, tuple) else (found,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"a tool must return an answer, a reward and metrics, not {shown(found)}")
    answer, reward, metrics = (*parts, None, None)[:3]
    text = getattr(answer, "text", answer)
    return ToolResult(text=as_text(text), reward=float(reward or 0.0), metrics=numbers_in(metrics))


def numbers_in(metrics: Mapping[Any, Any] | None) -> dict[str, float]:
    """The metrics of a user's code that are numbers."""
    found = (metrics or {}).items()
    return {str(name): float(value) for name, value in found if isinstance(value, int | float)}


def as_text(value: Any) -> str:
    """Return the value of a tool as text for the policy."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def tool_limits(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `timeout_s` and `max_concurrent` of a user's settings, as fields of `ToolInfo`.

    Raises ConfigError, naming `where`, if they are not positive numbers.
    """
    limits: dict[str, Any] = {}
    if "timeout_s" in settings:
        value = settings["timeout_s"]
        if not _is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{where}: timeout_s must be a positive number, got {value!r}")
        limits["timeout_s"] = float(value)
    if settings.get("max_concurrent") is not None:
        value = settings["max_concurrent"]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: max_concurrent must be a positive integer, got {value!r}")
        limits["max_concurrent"] = value
    return limits


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def clean(value: Any) -> Any:
    """Return a JSON value whose texts have no unpaired surrogates, which cannot be sent."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {clean(key): clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    return value


def tool_name(schema: ToolSchema) -> str:
    """Return the name in a schema."""
    return str(schema["function"]["name"])
