"""Tools of MCP servers, over standard input and output or HTTP.

    {"mcpServers": {"search": {"command": "search-server", "args": ["--small"]},
                    "maps": {"url": "http://localhost:8000/mcp"}}}

Each server has one connection in a run, on a thread of its own. After a lost connection, the next
call connects again. Needs the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.environment.protocol import InfrastructureError
from slipstream.environment.tools.protocol import (
    Tool,
    ToolInfo,
    ToolResult,
    ToolSession,
    clean,
    tool_limits,
)
from slipstream.errors import ConfigError, shortened
from slipstream.reading import reason
from slipstream.threads import arrival

T = TypeVar("T")

KEY = "actor_rollout_ref.rollout.multi_turn.mcp_config_path"

START_S = 60.0
"""Time limit to start a server and to read its tools, in seconds."""

_KNOWN = {"command", "args", "env", "cwd", "url", "timeout_s", "max_concurrent"}


def load_mcp_tools(path: str | Path) -> list[Tool]:
    """Start or reach the servers of a JSON file, and return their tools.

    Raises ConfigError if the file or a server cannot be used, or the package `mcp` is missing.
    """
    tools: list[Tool] = []
    atexit.register(close_servers, tools)
    for name, entry in _entries(path).items():
        server = McpServer(name, _target(name, entry))
        limits = tool_limits(entry, f"{KEY}={path}: server {name!r}")
        try:
            listed = server.tools()
        except InfrastructureError as error:
            raise ConfigError(f"{KEY}={path}: {error}; check its command or URL") from error
        tools += [McpTool(server=server, schema=schema, **limits) for schema in listed]
    return tools


def _entries(path: str | Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{KEY}={path} cannot be read ({reason(error)})") from error
    servers = found.get("mcpServers") if isinstance(found, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(
            f'{KEY}={path} has no "mcpServers"; write {{"mcpServers": {{"NAME": {{"command": '
            '"PROGRAM", "args": []}}}}, or "url" instead of "command"'
        )
    for name, entry in servers.items():
        if not isinstance(entry, Mapping) or ("command" in entry) == ("url" in entry):
            raise ConfigError(f'{KEY}={path}: server {name!r} needs either "command" or "url"')
        if unknown := sorted(entry.keys() - _KNOWN):
            raise ConfigError(
                f"{KEY}={path}: server {name!r} has unknown keys: {', '.join(unknown)} (known: "
                f"{', '.join(sorted(_KNOWN))})"
            )
    return servers


def _target(name: str, entry: Mapping[str, Any]) -> Any:
    """What `mcp.Client` connects to: a URL, or the parameters of a program."""
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise ConfigError(
            f"{KEY} needs the package mcp (MCP server {name!r}): pip install slipstream-rl[mcp]"
        ) from error
    if "url" in entry:
        return str(entry["url"])
    chosen = {key: entry[key] for key in ("command", "args", "env", "cwd") if key in entry}
    try:
        return StdioServerParameters(**chosen)
    except ValueError as error:
        raise ConfigError(f"{KEY}: server {name!r}: {reason(error)}") from error


class McpServer:
    """A connection to one server. Its event loop runs on a daemon thread."""

    def __init__(self, name: str, target: Any) -> None:
        """`target` is what `mcp.Client` connects to. The connection opens at the first use."""
        self.name = name
        self._target = target
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the server's tools. Raises InfrastructureError if it cannot be
        reached within `START_S`."""
        connection = self._current()
        try:
            connection.ready.result(START_S)
            return connection.submit(_all_tools).result(START_S)
        except TimeoutError as error:
            raise self._failed(connection, f"no answer within {START_S:g} s") from error
        except Exception as error:
            raise self._failed(connection, _innermost(error)) from error

    async def connect(self) -> None:
        """Wait until the connection is open. Raises InfrastructureError if it cannot be opened
        within `START_S`."""
        await self._opened()

    async def _opened(self) -> _Connection:
        """The connection, when it is open."""
        connection = self._current()
        await arrival(connection.ready, START_S)
        if not connection.ready.done():
            raise self._failed(connection, f"no connection within {START_S:g} s")
        if (error := connection.ready.exception()) is not None:
            raise self._failed(connection, _innermost(error))
        return connection

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the text of its answer.

        Raises RuntimeError for an error that the tool reports, and InfrastructureError if the
        connection is lost.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self._opened()
        try:
            future = connection.submit(lambda client: client.call_tool(tool, dict(arguments)))
        except RuntimeError as error:  # its event loop has ended
            raise self._failed(connection, "the connection is closed") from error
        try:
            await arrival(future)
        finally:
            future.cancel()  # has no effect on a call that has ended
        try:
            result = future.result()
        except MCPError as error:
            lost = error.error.code == CONNECTION_CLOSED or str(error) in _LOST
            if lost or not connection.is_open:
                raise self._failed(connection, str(error)) from error
            raise RuntimeError(shortened(str(error))) from error
        except Exception as error:
            # A group comes from the tasks of the transport, for example from a refused connection.
            if isinstance(error, ExceptionGroup | OSError) or not connection.is_open:
                raise self._failed(connection, _innermost(error)) from error
            raise RuntimeError(shortened(reason(error))) from error
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise RuntimeError(shortened(text))
        return text

    def close(self) -> None:
        """End the connection, and the program if there is one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _current(self) -> _Connection:
        """The connection; a new one, which is not open yet, if the last one was lost."""
        with self._lock:
            if self._connection is None or not self._connection.is_open:
                self._connection = _Connection(self.name, self._target)
            return self._connection

    def _failed(self, connection: _Connection, why: str) -> InfrastructureError:
        connection.close()
        return InfrastructureError(f"MCP server {self.name!r}: {shortened(why)}")


_LOST = frozenset(
    {
        "Session terminated",
        "Server returned an error response",
        "SSE stream ended without a response",
    }
)
"""Messages of the client, not of tools, about HTTP servers that went away."""


class _Connection:
    """A `mcp.Client`, on an event loop of its own thread. `ready` has it when it is open."""

    def __init__(self, name: str, target: Any) -> None:
        self._target = target
        self.ready: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.is_open = True
        thread = threading.Thread(target=self._run, name=f"slipstream-mcp-{name}", daemon=True)
        thread.start()

    def submit(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine of the open client. Raises RuntimeError after the connection ended."""
        if not self.is_open:
            raise RuntimeError("the connection is closed")
        return asyncio.run_coroutine_threadsafe(call(self.ready.result()), self._loop)

    def close(self) -> None:
        """End the connection soon, also while it is being opened."""
        self.is_open = False
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                # The runner cancels the calls that are left, so that nobody waits for them.
                runner.run(self._serve())
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(_as_exception(error))
        finally:
            self.is_open = False

    async def _serve(self) -> None:
        from mcp import Client

        self._task = asyncio.current_task()
        async with Client(self._target) as client:
            self.ready.set_result(client)
            await asyncio.Event().wait()


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError("the connection was closed")


def _innermost(error: BaseException) -> str:
    """The reason of an error; of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return reason(error) if isinstance(error, Exception) else str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool(ToolInfo):
    """A tool of a server. All episodes share the server, and its state."""

    server: McpServer

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        await self.server.connect()
        return _McpSession(self.server, self.schema["function"]["name"], kwargs)


class _McpSession:
    def __init__(self, server: McpServer, tool: str, bound: Mapping[str, Any]) -> None:
        self._server = server
        self._tool = tool
        self._bound = bound

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        given = clean({**arguments, **self._bound})
        return ToolResult(text=await self._server.call(self._tool, given))

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        return None


async def _all_tools(client: Any) -> list[dict[str, Any]]:
    """The schemas of all tools, over all pages."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return found


def _text(part: Any) -> str:
    """The text of a part of an answer."""
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"({part.type}, which the policy cannot read)"


def close_servers(tools: Sequence[Tool]) -> None:
    """End the connections of the tools that belong to servers."""
    for server in {id(t.server): t.server for t in tools if isinstance(t, McpTool)}.values():
        server.close()
