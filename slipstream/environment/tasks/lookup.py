"""The tool of the lookup task: `look_up(name)` in the table of the problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.data.lookup import SCHEMA, look_up
from slipstream.environment.protocol import ToolSchema
from slipstream.environment.tools.protocol import ToolInfo, ToolResult, ToolSession


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpTool(ToolInfo):
    """Reads the table that a row has in its `tools_kwargs`. Each call costs the row's `cost`."""

    schema: ToolSchema = field(default_factory=lambda: SCHEMA)

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        return LookUpSession(kwargs["table"], float(kwargs["cost"]))


class LookUpSession:
    """The table of one episode."""

    def __init__(self, table: Mapping[str, Mapping[str, str]], cost: float) -> None:
        self.table = table
        self._cost = cost

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text=look_up(self.table, arguments["name"]), reward=-self._cost)

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        return None
