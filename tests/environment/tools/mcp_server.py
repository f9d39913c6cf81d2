"""An MCP server for tests: `python -m tests.environment.tools.mcp_server [PORT]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def die_once(mark: str) -> str:
    """End the server, unless the file exists."""
    if Path(mark).exists():
        return "back"
    Path(mark).touch()
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
