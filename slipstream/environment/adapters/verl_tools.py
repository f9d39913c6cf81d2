"""Tools written for VERL: classes derived from `BaseTool`, named in a YAML file.

    tools:
      - class_name: my_tools.Search
        config: {type: native, timeout_s: 30}
        tool_schema: {type: function, function: {name: search, ...}}

VERL creates and releases the state of a tool around every single call. Here it lives as long as the
episode: `create` before the first turn, `execute` for each call, then `calc_reward` and `release`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.environment.adapters.settings import load_class, make_object, read_entries
from slipstream.environment.protocol import ToolSchema
from slipstream.environment.tools.function import accepted, call_either
from slipstream.environment.tools.protocol import (
    Tool,
    ToolInfo,
    ToolResult,
    ToolSession,
    result_of,
    tool_limits,
)
from slipstream.errors import ConfigError

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def load_verl_tools(path: str | Path) -> list[Tool]:
    """Return the tools of a YAML file. Raises ConfigError, which names the option, for entries that
    cannot be used."""
    return [_tool(entry) for entry in read_entries(path, key=KEY, section="tools")]


def _tool(entry: Mapping[str, Any]) -> Tool:
    cls = load_class(entry, key=KEY)
    config = dict(entry.get("config") or {})
    kind = config.get("type", "native")
    if kind != "native":
        raise ConfigError(f"{KEY}: {cls.__name__}: config.type={kind} is not supported; use native")
    given = entry.get("tool_schema")
    schema = None if given is None else _as_object(given)
    made = make_object(cls, {"config": config, "tool_schema": schema}, key=KEY)
    return VerlTool.of(made, config)


def _as_object(given: Mapping[str, Any]) -> Any:
    """The schema as an object with attributes, which tools read (`tool_schema.function.name`)."""
    from slipstream.environment.adapters.verl_schemas import OpenAIFunctionToolSchema

    return OpenAIFunctionToolSchema.model_validate(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlTool(ToolInfo):
    """A `Tool` of an object of VERL's interface."""

    tool: Any

    @classmethod
    def of(cls, tool: Any, config: Mapping[str, Any] | None = None) -> VerlTool:
        """Return the tool of an object.

        Its configuration may have `timeout_s` and `max_concurrent`, the limits of its calls, and
        `parallel`: whether calls of one turn may run at the same time. Raises ConfigError if the
        object has no schema.
        """
        config = config or {}
        return cls(
            tool=tool,
            schema=_schema_of(tool),
            **tool_limits(config, f"{KEY}: {type(tool).__name__}"),
            # One instance answers all calls of an episode, and its state may not allow two at once.
            parallel=bool(config.get("parallel", False)),
        )

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        return await VerlToolSession.begin(self.tool, kwargs)


class VerlToolSession:
    """The state of a tool in one episode, under an instance id."""

    def __init__(self, tool: Any, instance_id: str) -> None:
        self._tool = tool
        self._id = instance_id

    @classmethod
    async def begin(cls, tool: Any, kwargs: Mapping[str, Any]) -> VerlToolSession:
        """Create an instance. Tools read the row's arguments by name, or in `create_kwargs`."""
        instance_id = str(uuid4())
        own = copy.deepcopy(dict(kwargs))
        wanted = accepted(tool.create, {**own, "create_kwargs": own})
        found = await call_either(tool.create, instance_id, **wanted)
        if isinstance(found, tuple) and found:
            (found, *_) = found
        return cls(tool, found if isinstance(found, str) else instance_id)

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        found = await call_either(self._tool.execute, self._id, dict(arguments))
        return result_of(found)

    async def score(self) -> float:
        found = await call_either(self._tool.calc_reward, self._id)
        return 0.0 if found is None else float(found)

    async def close(self) -> None:
        await call_either(self._tool.release, self._id)


def _schema_of(tool: Any) -> ToolSchema:
    found = getattr(tool, "tool_schema", None)
    if found is None:
        found = tool.get_openai_tool_schema()
    plain = found if isinstance(found, Mapping) else _plain(found)
    name = (plain.get("function") or {}).get("name") if isinstance(plain, Mapping) else None
    if not name:
        raise ConfigError(
            f"{KEY}: {type(tool).__name__} has no tool_schema with function.name; write it in the "
            "file, or return it from get_openai_tool_schema"
        )
    return dict(plain)


def _plain(schema: Any) -> Any:
    dump: Callable[..., Any] | None = getattr(schema, "model_dump", None)
    return {} if dump is None else dump(exclude_unset=True, exclude_none=True)
