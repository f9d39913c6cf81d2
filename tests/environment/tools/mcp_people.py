"""An MCP server with a table of people: `python -m tests.environment.tools.mcp_people [PORT]`."""

from __future__ import annotations

import sys

from mcp.server import MCPServer

server = MCPServer("people")


@server.tool()
def look_up(name: str) -> str:
    """Look up a person.

    Args:
        name: who to look up
    """
    return f"{name} : friend ana , boss paul , teacher will , neighbor noah"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
