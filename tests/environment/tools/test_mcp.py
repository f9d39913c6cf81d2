"""Tools of real MCP servers, over standard input and output and over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.environment.protocol import (
    Answer,
    AssistantMessage,
    InfrastructureError,
    ToolCall,
    Turn,
)
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment
from slipstream.environment.tools.mcp import close_servers, load_mcp_tools
from slipstream.environment.tools.protocol import Tool, tool_name
from slipstream.errors import ConfigError
from slipstream.types import Prompt
from tests.docs.pages import ROOT
from tests.environment.serving import serving

MODULE = "tests.environment.tools.mcp_server"
COMMAND = {"command": sys.executable, "args": ["-m", MODULE], "cwd": str(ROOT)}


def write(folder: Path, **servers: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[list[Tool]]:
    tools = load_mcp_tools(path)
    try:
        yield tools
    finally:
        close_servers(tools)


@pytest.fixture(params=["stdio", "http"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Tool]]:
    if request.param == "stdio":
        with loaded(write(tmp_path, test=COMMAND)) as found:
            yield found
        return
    with (
        serving(MODULE) as (url, _),
        loaded(write(tmp_path, test={"url": f"{url}/mcp"})) as found,
    ):
        yield found


def call(tool: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call{number:05d}", name=tool, arguments=arguments)


def answers(tools: list[Tool], *calls: ToolCall, repeat: int = 1) -> list[str]:
    async def work() -> list[str]:
        environment = ToolEnvironment(Toolbox(tools))
        await environment.reset(Prompt(uid="q", ids=[1]), 0)
        found: list[str] = []
        for number in range(repeat):
            turn = Turn(message=AssistantMessage(text="", tool_calls=calls), number=number)
            answer: Answer = await environment.step(turn)
            found += [message["content"] for message in answer.messages]
        await environment.close()
        return found

    return anyio.run(work)


def test_tools_of_a_server_are_listed_and_called(tools: list[Tool]) -> None:
    names = ["add", "fail", "die", "die_once", "sleep"]
    assert [tool_name(tool.schema) for tool in tools] == names
    function = tools[0].schema["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a"]
    assert answers(tools, call("add", a=2), call("add", 1, a=2, b=5)) == ["3", "7"]
    assert answers(tools, call("add", a="x"))[0].startswith("Error: the argument 'a'")


def test_an_error_of_a_tool_is_an_answer(tools: list[Tool]) -> None:
    (text,) = answers(tools, call("fail", text="no such city"))
    assert text.startswith("Error: ")
    assert "no such city" in text


def test_a_server_that_goes_away_is_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    with loaded(write(tmp_path, test=COMMAND)) as tools:
        with pytest.raises(InfrastructureError, match="test"):
            answers(tools, call("die"))
        # The next call starts the server again.
        assert answers(tools, call("add", a=2)) == ["3"]


def test_a_slow_tool_times_out(tmp_path: Path) -> None:
    with loaded(write(tmp_path, test={**COMMAND, "timeout_s": 0.3})) as tools:
        (text,) = answers(tools, call("sleep", seconds=5.0))
        assert "0.3 s" in text


def test_the_program_ends_with_the_connection(tmp_path: Path) -> None:
    tools = load_mcp_tools(write(tmp_path, test=COMMAND))
    before = _children()
    close_servers(tools)
    for _ in range(100):
        if len(_children()) < len(before):
            return
        time.sleep(0.05)
    raise AssertionError("the server still runs")


def _children() -> list[str]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    )
    return listed.stdout.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("{}", "mcpServers"),
        ('{"mcpServers": {"a": {}}}', "either"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "either"),
        ('{"mcpServers": {"a": {"command": "x", "arg": []}}}', "unknown keys: arg"),
        ('{"mcpServers": {"a": {"command": "no-such-program-here"}}}', "'a'"),
        ('{"mcpServers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}', "'a'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_mcp_tools(path)
    assert words in str(caught.value)


def test_a_server_that_does_not_come_back_is_a_failure_of_the_infrastructure(
    tmp_path: Path,
) -> None:
    with (
        serving(MODULE) as (url, process),
        loaded(write(tmp_path, test={"url": f"{url}/mcp"})) as tools,
    ):

        async def work() -> None:
            session = await tools[0].open({})
            assert (await session.execute({"a": 2})).text == "3"
            process.kill()
            process.wait()
            for _ in range(3):  # the lost connection, and new ones that are refused
                with pytest.raises(InfrastructureError, match=r"server 'test': .*[Cc]onnect"):
                    await session.execute({"a": 2})

        anyio.run(work)


def test_a_call_opens_a_lost_connection_again(tmp_path: Path) -> None:
    with loaded(write(tmp_path, test=COMMAND)) as tools:

        async def work() -> str:
            session = await tools[0].open({})
            other = await tools[2].open({})
            with pytest.raises(InfrastructureError):
                await other.execute({})
            return (await session.execute({"a": 2})).text

        assert anyio.run(work) == "3"
