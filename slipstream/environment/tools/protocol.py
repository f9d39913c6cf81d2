"""The interface of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.environment.protocol import ToolSchema

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


def tool_name(schema: ToolSchema) -> str:
    """Return the name in a schema."""
    return str(schema["function"]["name"])
