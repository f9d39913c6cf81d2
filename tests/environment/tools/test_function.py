"""Functions as tools: schema, values as text, and files with tools."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from slipstream.environment.tools.function import (
    FunctionTool,
    call_either,
    function_tool,
    load_function_tools,
)
from slipstream.environment.tools.protocol import ToolResult, as_text, tool_name
from slipstream.errors import ConfigError, DataError


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def later(a: int) -> str:
    """Wait.

    Args:
        a: A number.
    """
    await anyio.lowlevel.checkpoint()
    return f"later {a}"


def execute(tool: FunctionTool, arguments: dict[str, Any], **kwargs: Any) -> str:
    async def work() -> str:
        session = await tool.open(kwargs)
        return (await session.execute(arguments)).text

    return anyio.run(work)


def test_the_schema_comes_from_hints_and_docstring() -> None:
    function = FunctionTool.of(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"


def test_functions_and_coroutine_functions_are_called() -> None:
    assert execute(FunctionTool.of(add), {"a": 1}) == "3"
    assert execute(FunctionTool.of(later), {"a": 1}) == "later 1"


def test_a_row_binds_parameters_that_the_policy_does_not_see() -> None:
    tool = FunctionTool.of(add, bound=("a",))
    parameters = tool.schema["function"]["parameters"]
    assert (list(parameters["properties"]), parameters["required"]) == (["b"], [])
    assert execute(tool, {"b": 1}, a=10) == "11"
    assert execute(tool, {"a": 5, "b": 1}, a=10) == "11"
    with pytest.raises(ConfigError, match="bound"):
        FunctionTool.of(add, bound=("c",))


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_function_that_exits_does_not_end_the_run(coroutine: bool) -> None:
    def leave(text: str) -> None:
        sys.exit(text)

    async def leave_later(text: str) -> None:
        sys.exit(text)

    with pytest.raises(RuntimeError, match="bye"):
        anyio.run(call_either, leave_later if coroutine else leave, "bye")


def test_many_functions_run_in_threads_at_the_same_time() -> None:
    barrier = threading.Barrier(60)

    async def work() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(call_either, barrier.wait, 30.0)

    anyio.run(work)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("a", "a"),
        (b"a\xff", "a\N{REPLACEMENT CHARACTER}"),
        ({"ü": [1, None]}, '{"ü": [1, null]}'),
        (1.5, "1.5"),
        ({1}, "{1}"),
    ],
)
def test_values_become_text(value: Any, text: str) -> None:
    assert as_text(value) == text


def test_a_function_without_hints_names_the_remedy() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(ConfigError, match="docstring"):
        FunctionTool.of(bare)


_FILE = '''
from slipstream.environment.tools.function import function_tool

def helper(x: int) -> int:
    """Help.

    Args:
        x: A number.
    """
    return x

{decorator}
def shout(text: str) -> str:
    """Shout.

    Args:
        text: A text.
    """
    return text.upper()

def _hidden():
    pass
'''


@pytest.mark.parametrize(
    ("decorator", "names", "timeout_s"),
    [
        ("", ["helper", "shout"], 30.0),
        ("@function_tool", ["shout"], 30.0),
        ("@function_tool(timeout_s=5.0, max_concurrent=2, parallel=False)", ["shout"], 5.0),
    ],
)
def test_a_file_has_the_decorated_functions_or_all(
    tmp_path: Path, decorator: str, names: list[str], timeout_s: float
) -> None:
    path = tmp_path / "tools.py"
    path.write_text(_FILE.format(decorator=decorator))
    tools = load_function_tools(path)
    assert [tool_name(tool.schema) for tool in tools] == names
    assert tools[-1].timeout_s == timeout_s
    assert execute(tools[-1], {"text": "hi"}) == "HI"


@pytest.mark.parametrize("text", ["x = 1", "def broken(:", "import nothing_of_this_name"])
def test_a_file_without_usable_functions_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match="function_tool_path"):
        load_function_tools(path)


def test_a_function_of_a_file_without_schema_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("def bare(x):\n    return x\n")
    with pytest.raises(ConfigError, match=r"function_tool_path .*tool bare: .*type hints"):
        load_function_tools(path)


def test_the_decorator_keeps_the_function() -> None:
    assert function_tool(add) is add
    assert function_tool(parallel=False)(add) is add
    del add.__slipstream_tool__


def test_a_function_may_return_a_reward_and_metrics() -> None:
    def scored(text: str) -> tuple[str, float, dict[str, int]]:
        """Score.

        Args:
            text: A text.
        """
        return text, 0.5, {"n": 2}

    async def work() -> ToolResult:
        session = await FunctionTool.of(scored).open({})
        return await session.execute({"text": "a"})

    assert anyio.run(work) == ToolResult(text="a", reward=0.5, metrics={"n": 2.0})


def test_a_row_without_a_bound_value_is_refused() -> None:
    tool = FunctionTool.of(add, bound=("a",))
    with pytest.raises(DataError, match="'a'"):
        anyio.run(tool.open, {})
    # What is not bound does not reach the function.
    assert execute(tool, {}, a=1, other=3) == "3"


@pytest.mark.parametrize("options", [{"max_concurrent": 0}, {"timeout_s": 0}, {"timeout_s": "x"}])
def test_impossible_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FunctionTool.of(add, **options)


def test_the_decorator_takes_a_name_as_in_verl(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    text = _FILE.format(decorator='@function_tool("yell")')
    path.write_text(text.replace("slipstream.environment.tools", "slipstream.compat.verl.tools"))
    source = path.read_text().replace("tools.function ", "tools.function_tool ")
    path.write_text(source)
    (tool,) = load_function_tools(path)
    assert tool_name(tool.schema) == "yell"


def test_what_is_no_exception_becomes_one() -> None:
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("out of bounds")

    with pytest.raises(RuntimeError, match="PanicException: out of bounds"):
        anyio.run(call_either, panic)


def test_a_function_changes_only_a_copy_of_the_values_of_its_row() -> None:
    def count(seen: list[int]) -> int:
        """Count.

        Args:
            seen: Numbers.
        """
        seen.append(1)
        return len(seen)

    tool, seen = FunctionTool.of(count, bound=("seen",)), list[int]()
    assert [execute(tool, {}, seen=seen) for _ in range(2)] == ["1", "1"]
    assert seen == []
