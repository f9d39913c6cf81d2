"""Python functions as tools. Transformers makes their schemas from type hints and docstrings."""

from __future__ import annotations

import copy
import inspect
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from slipstream.environment.protocol import ToolSchema
from slipstream.environment.tools.protocol import (
    TIMEOUT_S,
    ToolInfo,
    ToolResult,
    ToolSession,
    result_of,
    tool_limits,
    tool_name,
)
from slipstream.errors import ConfigError, DataError, did_you_mean, reason_of
from slipstream.reading import reason
from slipstream.threads import DaemonThreads, arrival
from slipstream.user_code import import_module

KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"

_THREADS = DaemonThreads("slipstream-tool")

_OPTIONS = "__slipstream_tool__"
"""The attribute of a function with the options of its tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool(ToolInfo):
    """A tool that calls a function, or a coroutine function, with the arguments of the call.

    The function returns a text, or a tuple of a text, a reward and metrics. Other values are
    written as JSON, None as an empty text. A function that is no coroutine function runs in a
    thread. After its time limit its answer is not used, but the thread runs on.
    """

    function: Callable[..., Any]
    bound: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        *,
        schema: ToolSchema | None = None,
        bound: Sequence[str] = (),
        **options: Any,
    ) -> FunctionTool:
        """Return the tool of a function. `options` are fields of `ToolInfo`.

        Parameters in `bound` come from the row (`tools_kwargs`); the policy does not see them.
        Raises ConfigError if the function has no type hints or no docstring, and no `schema` is
        given.
        """
        found = _without(schema or function_schema(function), bound)
        name = found["function"]["name"]
        options |= tool_limits(options, f"tool {name}")
        return cls(function=function, schema=found, bound=tuple(bound), **options)

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        if missing := [name for name in self.bound if name not in kwargs]:
            raise DataError(
                f"a row has no {missing[0]!r} in tools_kwargs[{tool_name(self.schema)!r}]"
                f"[create_kwargs], which the tool binds; add it to every row"
            )
        # Other tools of the row's library may have more. The function may change its values, which
        # all samples of a row share.
        own = {name: copy.deepcopy(kwargs[name]) for name in self.bound}
        return _FunctionSession(self.function, own)


class _FunctionSession:
    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Any]) -> None:
        self._function = function
        self._bound = bound

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        return result_of(await call_either(self._function, **{**arguments, **self._bound}))

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        return None


def function_tool(
    function: Callable[..., Any] | str | None = None,
    *,
    schema: ToolSchema | None = None,
    timeout_s: float = TIMEOUT_S,
    max_concurrent: int | None = None,
    parallel: bool = True,
    bound: Sequence[str] = (),
) -> Any:
    """A decorator that makes a function a tool of `multi_turn.function_tool_path`.

    It can be used with options or without. As in VERL, a text in place of the function is the name
    of the tool. The function stays as it is.
    """
    name = function if isinstance(function, str) else None

    def mark(found: Callable[..., Any]) -> Callable[..., Any]:
        own = schema
        if name is not None:
            own = own or function_schema(found)
            own = {**own, "function": {**own["function"], "name": name}}
        options = {
            "schema": own,
            "timeout_s": timeout_s,
            "max_concurrent": max_concurrent,
            "parallel": parallel,
            "bound": bound,
        }
        setattr(found, _OPTIONS, options)
        return found

    return mark(function) if callable(function) else mark


def load_function_tools(path: Path) -> list[FunctionTool]:
    """Return the tools of a Python file: the functions with the decorator `function_tool`, or all
    public functions that it defines if none has it.

    Raises ConfigError if the file cannot be imported or has no functions.
    """
    module = import_module(path, key=KEY)
    own = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    marked = [value for value in own if hasattr(value, _OPTIONS)]
    if not own:
        raise ConfigError(f"{KEY} {str(path)!r} defines no function; define the tools there")
    try:
        return [FunctionTool.of(value, **getattr(value, _OPTIONS, {})) for value in marked or own]
    except ConfigError as error:
        raise ConfigError(f"{KEY} {str(path)!r}: {error}") from error


async def call_either(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread, or await a coroutine function.

    The thread does not keep the process from ending. A cancelled call leaves it running. Raises
    RuntimeError if the function calls `sys.exit`, or raises what is no `Exception`, as libraries
    written in Rust do for their own mistakes.
    """
    try:
        inner = function.func if isinstance(function, partial) else function
        if inspect.iscoroutinefunction(inner):
            return await function(*args, **kwargs)
        work = _THREADS.submit(partial(function, *args, **kwargs))
        await arrival(work)
        value = work.result()
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error
    except (Exception, KeyboardInterrupt, GeneratorExit, CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(reason_of(error)) from error


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function has as parameters; all if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _without(schema: ToolSchema, bound: Sequence[str]) -> ToolSchema:
    """The schema without the parameters `bound`. Raises ConfigError for one that it lacks."""
    if not bound:
        return schema
    function = dict(schema["function"])
    parameters = dict(function.get("parameters") or {})
    properties = dict(parameters.get("properties") or {})
    for name in bound:
        if name not in properties:
            raise ConfigError(
                f"tool {function['name']}: bound has {name!r}, which is no parameter"
                f"{did_you_mean(name, properties)}"
            )
        del properties[name]
    required = [name for name in parameters.get("required") or () if name not in bound]
    function["parameters"] = {**parameters, "properties": properties, "required": required}
    return {**schema, "function": function}


def function_schema(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema of a function. Raises ConfigError, which says what it lacks."""
    try:
        found: ToolSchema = get_json_schema(function)
    except Exception as error:  # transformers' own exceptions, and those of hints
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"tool {name}: no schema can be made of it ({reason(error)}); give it type hints and a "
            "docstring with a description and an `Args:` section that names every parameter"
        ) from error
    return found
