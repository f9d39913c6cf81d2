"""Tools of built-in tasks by the name of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.data.lookup import LookupTask
from slipstream.environment.tasks.lookup import LookUpTool
from slipstream.environment.tools.protocol import Tool
from slipstream.errors import ConfigError

_TOOLS: dict[str, Callable[[], Sequence[Tool]]] = {LookupTask.name: lambda: [LookUpTool()]}


def register_task_tools(name: str, make: Callable[[], Sequence[Tool]]) -> None:
    """Register the tools of the task `name`. Raises ConfigError if it already has tools."""
    if name in _TOOLS:
        raise ConfigError(f"task {name!r} already has tools; choose another name")
    _TOOLS[name] = make


def task_tools(name: str | None) -> Sequence[Tool]:
    """Return the tools of a task; none for a task without tools, and for None."""
    make = None if name is None else _TOOLS.get(name)
    return [] if make is None else make()
