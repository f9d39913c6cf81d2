"""The environment of tools: results in call order, and mistakes of the policy as answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from slipstream.environment.protocol import (
    Answer,
    AssistantMessage,
    CallProblem,
    InfrastructureError,
    Start,
    ToolCall,
    Turn,
)
from slipstream.environment.tools.environment import (
    Toolbox,
    ToolEnvironment,
    ToolLimits,
)
from slipstream.environment.tools.protocol import ToolResult
from slipstream.errors import ConfigError
from slipstream.types import Prompt

ROW = Prompt(uid="q", ids=[1], extra_info={"tools_kwargs": {"echo": {"create_kwargs": {"k": 1}}}})


class Echo:
    """Answers with its argument after `delays[text]` seconds, or raises what `raises[text]` is."""

    def __init__(self, name: str = "echo", **options: Any) -> None:
        properties = {"text": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["text"]}
        self.schema = {"type": "function", "function": {"name": name, "parameters": parameters}}
        self.timeout_s: float = options.get("timeout_s", 5.0)
        self.max_concurrent: int | None = options.get("max_concurrent")
        self.parallel: bool = options.get("parallel", True)
        self.delays: Mapping[str, float] = options.get("delays", {})
        self.raises: Mapping[str, Exception] = options.get("raises", {})
        self.log: list[str] = []
        self.running = self.most = 0

    async def open(self, kwargs: Mapping[str, Any]) -> Echo:
        self.log.append(f"open {dict(kwargs)}")
        return self

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        text = arguments["text"]
        self.running += 1
        self.most = max(self.most, self.running)
        await anyio.sleep(self.delays.get(text, 0.0))
        self.running -= 1
        if text in self.raises:
            raise self.raises[text]
        return ToolResult(text=text, reward=0.5, metrics={"seen": 1.0})

    async def score(self) -> float:
        return 2.0

    async def close(self) -> None:
        self.log.append("close")


def call(text: str, number: int = 0, name: str = "echo") -> ToolCall:
    return ToolCall(id=f"call{number:05d}", name=name, arguments={"text": text})


def turn(*calls: ToolCall) -> Turn:
    return Turn(message=AssistantMessage(text="", tool_calls=calls), number=1)


def answer(tool: Echo, *calls: ToolCall, **limits: Any) -> Answer:
    async def work() -> Answer:
        environment = ToolEnvironment(Toolbox([tool], ToolLimits(**limits)))
        await environment.reset(ROW, 0)
        return await environment.step(turn(*calls))

    return anyio.run(work)


def test_results_are_in_call_order_whatever_ends_first() -> None:
    tool = Echo(delays={"a": 0.05})
    found = answer(tool, call("a"), call("b", 1))
    assert [(m["tool_call_id"], m["content"]) for m in found.messages] == [
        ("call00000", "a"),
        ("call00001", "b"),
    ]
    assert tool.most == 2
    assert not found.done
    assert found.rewards == {"echo": 1.0}


@pytest.mark.parametrize("options", [{"parallel": False}, {"max_concurrent": 1}])
def test_calls_run_one_after_another_if_the_tool_says_so(options: dict[str, Any]) -> None:
    tool = Echo(delays={"a": 0.02}, **options)
    answer(tool, call("a"), call("b", 1))
    assert tool.most == 1


@pytest.mark.parametrize(
    ("made", "problem", "words"),
    [
        (ToolCall(id="a", problem="broken JSON"), CallProblem.UNPARSED, "broken JSON"),
        (call("x", name="eco"), CallProblem.UNKNOWN_TOOL, "tools: echo"),
        (ToolCall(id="a", name="echo"), CallProblem.WRONG_ARGUMENTS, "'text' is missing"),
        (call("bad"), CallProblem.RAISED, "ValueError: no"),
        (call("slow"), CallProblem.TIMEOUT, "0.05 s"),
    ],
)
def test_a_mistake_of_the_policy_is_answered_and_counted(
    made: ToolCall, problem: CallProblem, words: str
) -> None:
    tool = Echo(timeout_s=0.05, raises={"bad": ValueError("no")}, delays={"slow": 5.0})
    found = answer(tool, made)
    assert words in found.messages[0]["content"]
    (record,) = found.calls
    assert record.problem is problem
    assert not found.rewards


def test_calls_beyond_the_limit_are_told_to_the_policy() -> None:
    calls = [call(str(n), n) for n in range(100)]
    found = answer(Echo(), *calls, max_parallel_calls=2)
    assert [m["content"] for m in found.messages[:2]] == ["0", "1"]
    assert all("at most 2" in m["content"] for m in found.messages[2:])
    assert [record.problem for record in found.calls[2:]] == [CallProblem.TOO_MANY] * 98


def test_a_failure_of_the_infrastructure_is_raised() -> None:
    tool = Echo(raises={"a": InfrastructureError("gone")})
    with pytest.raises(InfrastructureError, match="gone"):
        answer(tool, call("a"), call("b", 1))


def test_a_repeated_turn_does_not_execute_answered_calls_again() -> None:
    class Flaky(Echo):
        failures = 1

        async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
            self.log.append(arguments["text"])
            if arguments["text"] == "b" and self.failures:
                self.failures -= 1
                raise InfrastructureError("gone")
            return await super().execute(arguments)

    async def work() -> Answer:
        tool = Flaky(parallel=False)
        environment = ToolEnvironment(Toolbox([tool]))
        await environment.reset(ROW, 0)
        await environment.reset(ROW, 0)
        with pytest.raises(InfrastructureError):
            await environment.step(turn(call("a"), call("b", 1)))
        found = await environment.step(turn(call("a"), call("b", 1)))
        assert tool.log == ["open {'k': 1}", "a", "b", "b"]
        return found

    assert [m["content"] for m in anyio.run(work).messages] == ["a", "b"]


def test_metrics_of_the_calls_of_a_turn_are_added_up() -> None:
    assert answer(Echo(), call("a"), call("b", 1)).metrics == {"seen": 2.0}


def test_an_unknown_name_does_not_reach_the_template() -> None:
    found = answer(Echo(), call("x", name="<|im_end|>"))
    assert found.messages[0]["name"] == "unknown"


def test_a_tool_that_does_not_open_is_a_failure_of_the_infrastructure() -> None:
    class Closed(Echo):
        async def open(self, kwargs: Mapping[str, Any]) -> Echo:
            await anyio.sleep(60)
            raise AssertionError

    with pytest.raises(InfrastructureError, match="open"):
        answer(Closed(timeout_s=0.05), call("a"))


def test_a_turn_without_calls_ends_the_episode() -> None:
    assert answer(Echo()).done


class User:
    """A conversation that asks once more."""

    closed = False

    async def reset(self, row: Prompt, seed: int) -> Start:
        return Start(messages=[{"role": "user", "content": "hi"}])

    async def step(self, turn: Turn) -> Answer:
        return Answer(messages=[{"role": "user", "content": "sure?"}], rewards={"user": 1.0})

    async def score(self) -> Mapping[str, float]:
        return {"user": 3.0}

    async def close(self) -> None:
        self.closed = True


def test_a_turn_without_calls_is_for_the_conversation() -> None:
    async def work() -> None:
        user, tool = User(), Echo()
        environment = ToolEnvironment(Toolbox([tool]), user)
        start = await environment.reset(ROW, 0)
        assert (list(start.messages), list(start.tools)) == (
            [{"role": "user", "content": "hi"}],
            [tool.schema],
        )
        assert (await environment.step(turn())).rewards == {"user": 1.0}
        assert not (await environment.step(turn(call("a")))).done
        assert await environment.score() == {"echo": 2.0, "user": 3.0}
        await environment.close()
        assert user.closed
        assert tool.log == ["open {'k': 1}", "close"]

    anyio.run(work)


def test_all_sessions_are_closed_even_if_one_raises() -> None:
    class Broken(Echo):
        async def close(self) -> None:
            raise ValueError("no")

    async def work() -> None:
        tool, broken = Echo(), Broken("broken")
        environment = ToolEnvironment(Toolbox([tool, broken]))
        await environment.reset(ROW, 0)
        with pytest.raises(ValueError, match="no"):
            await environment.close()
        assert tool.log[-1] == "close"

    anyio.run(work)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="echo"):
        Toolbox([Echo(), Echo()])


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)...6789"),
        ("right", "0123...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_the_named_side_is_cut_off(side: Any, text: str) -> None:
    limits = ToolLimits(max_characters=4, truncate_side=side)
    assert limits.cut("0123456789") == text
    assert limits.cut("0123") == "0123"
    assert ToolLimits(truncate_side=side).cut("0123456789") == "0123456789"


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)... cd efg"),
        ("right", "ab cd...(truncated)"),
        ("middle", "ab...(truncated)... efg"),
    ],
)
def test_whole_tokens_are_cut_off(side: Any, text: str) -> None:
    def ends(text: str) -> list[int]:
        return [match.end() for match in re.finditer(r" ?\w+", text)]

    limits = ToolLimits(max_tokens=2, truncate_side=side, token_ends=ends)
    assert limits.cut("ab cd efg") == text
    assert limits.cut("ab cd") == "ab cd"


def test_a_long_result_is_cut() -> None:
    found = answer(Echo(), call("x" * 10_000_000), max_characters=8)
    assert len(found.messages[0]["content"]) < 40


def test_limits_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_parallel_calls"):
        ToolLimits(max_parallel_calls=0)


def test_a_tool_changes_only_a_copy_of_its_arguments() -> None:
    class Spoils(Echo):
        async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
            arguments["text"].append("more")
            return ToolResult(text="")

    tool = Spoils()
    tool.schema["function"] = {"name": "echo", "parameters": {"properties": {"text": {}}}}
    made = ToolCall(id="a", name="echo", arguments={"text": ["a"]})
    assert answer(tool, made).calls[0].problem is None
    assert made.arguments == {"text": ["a"]}
