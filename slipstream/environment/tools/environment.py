"""The environment of tools: it executes the calls of a turn and returns the results as messages."""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import anyio

from slipstream.environment.protocol import (
    Answer,
    CallProblem,
    CallRecord,
    Environment,
    InfrastructureError,
    Start,
    ToolCall,
    Turn,
    within,
)
from slipstream.environment.tools.arguments import argument_problem
from slipstream.environment.tools.protocol import Tool, ToolResult, ToolSession, tool_name
from slipstream.errors import ConfigError, SlipstreamError, check_at_least_one, shortened
from slipstream.reading import reason
from slipstream.types import Message, Prompt

UNKNOWN = "unknown"
"""The name in answers to calls of tools that do not exist."""

TruncateSide = Literal["left", "right", "middle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of tool calls.

    `max_parallel_calls` is the number of calls in one turn that are executed; the policy is told
    about the others (None: no limit). `max_characters` limits the text of a result, and
    `max_tokens` its tokens; `truncate_side` is the side that is cut off, and `middle` keeps half of
    the limit at each end. `token_ends` returns the index in a text at which each token ends.
    """

    max_parallel_calls: int | None = None
    max_characters: int | None = None
    max_tokens: int | None = None
    truncate_side: TruncateSide = "middle"
    token_ends: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name in ("max_parallel_calls", "max_characters", "max_tokens"):
            if getattr(self, name) is not None:
                check_at_least_one(self, name)

    def cut(self, text: str) -> str:
        """Return the text of a result within the limits, with a mark where it was cut."""
        if self.max_tokens is not None and self.token_ends is not None:
            ends = self.token_ends(text)
            text = _cut(text, ends, self.max_tokens, self.truncate_side)
        if self.max_characters is not None:
            ends = range(1, len(text) + 1)
            text = _cut(text, ends, self.max_characters, self.truncate_side)
        return text


class Toolbox:
    """The tools of a run, by name, with their limits of concurrency."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits | None = None) -> None:
        """Raises ConfigError if two tools have the same name."""
        self.limits = limits or ToolLimits()
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            name = tool_name(tool.schema)
            if name in self._tools:
                raise ConfigError(f"there are two tools of the name {name!r}; rename one of them")
            self._tools[name] = tool
        self._slots: dict[str, anyio.Semaphore] = {}

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    def slot(self, name: str) -> AbstractAsyncContextManager[Any]:
        """A context manager that waits until one more call of the tool may run."""
        limit = self._tools[name].max_concurrent
        if limit is None:
            return nullcontext()
        if name not in self._slots:
            self._slots[name] = anyio.Semaphore(limit)
        return self._slots[name]


class ToolEnvironment:
    """An episode with tools. A turn without calls is for `conversation`, an environment that plays
    the user; without one it ends the episode."""

    def __init__(self, toolbox: Toolbox, conversation: Environment | None = None) -> None:
        self._toolbox = toolbox
        self._conversation = conversation
        self._sessions: dict[str, ToolSession] = {}
        self._done: dict[tuple[int, int], tuple[ToolResult, CallRecord]] = {}
        """Answers by turn and call. If a turn is repeated after a failure of the infrastructure,
        calls that were answered are not executed again."""

    async def reset(self, row: Prompt, seed: int) -> Start:
        given = row.extra_info.get("tools_kwargs") or {}
        for name, tool in self._toolbox.tools.items():
            if name not in self._sessions:  # the reset may be a repetition
                own = given.get(name) or {}
                kwargs = own.get("create_kwargs") or {}
                what = f"tool {name}: open"
                self._sessions[name] = await within(
                    tool.timeout_s, what, partial(tool.open, kwargs)
                )
        start = Start()
        if self._conversation is not None:
            start = await self._conversation.reset(row, seed)
        schemas = [tool.schema for tool in self._toolbox.tools.values()]
        return Start(messages=start.messages, tools=[*schemas, *start.tools])

    async def step(self, turn: Turn) -> Answer:
        calls = turn.message.tool_calls
        if not calls:
            if self._conversation is None:
                return Answer(done=True)
            return await self._conversation.step(turn)
        if len(calls) > 1 and all(self._may_run_together(call) for call in calls):
            try:
                async with anyio.create_task_group() as tasks:
                    for number, call in enumerate(calls):
                        tasks.start_soon(self._execute, turn.number, number, call)
            except BaseExceptionGroup as errors:
                raise _first(errors) from None
        else:
            for number, call in enumerate(calls):
                await self._execute(turn.number, number, call)
        results = [self._done[turn.number, number] for number in range(len(calls))]
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        messages: list[Message] = []
        for call, (result, record) in zip(calls, results, strict=True):
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": record.name,
                    "content": self._toolbox.limits.cut(result.text),
                }
            )
            if result.reward:
                rewards[record.name] = rewards.get(record.name, 0.0) + result.reward
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return Answer(
            messages=messages,
            rewards=rewards,
            calls=[record for _, record in results],
            metrics=metrics,
        )

    async def score(self) -> Mapping[str, float]:
        scores = {}
        for name, session in self._sessions.items():
            limit = self._toolbox.tools[name].timeout_s
            scores[name] = await within(limit, f"tool {name}: score", session.score)
        found = {name: score for name, score in scores.items() if score}
        if self._conversation is not None:
            found |= await self._conversation.score()
        return found

    async def close(self) -> None:
        closes = [session.close for session in self._sessions.values()]
        if self._conversation is not None:
            closes.append(self._conversation.close)
        # All are closed, even if one of them raises or hangs.
        errors: list[Exception] = []

        async def one(close: Callable[[], Awaitable[None]]) -> None:
            try:
                await close()
            except Exception as error:
                errors.append(error)

        if len(closes) == 1:
            await one(closes[0])
        else:
            async with anyio.create_task_group() as tasks:
                for close in closes:
                    tasks.start_soon(one, close)
        if errors:
            raise errors[0]

    def _may_run_together(self, call: ToolCall) -> bool:
        tool = self._toolbox.tools.get(call.name)
        return tool is None or tool.parallel

    async def _execute(self, turn: int, number: int, call: ToolCall) -> None:
        """Answer a call, unless it is answered already."""
        if (turn, number) not in self._done:
            self._done[turn, number] = await self._answer(number, call)

    async def _answer(self, number: int, call: ToolCall) -> tuple[ToolResult, CallRecord]:
        tools, most = self._toolbox.tools, self._toolbox.limits.max_parallel_calls
        if most is not None and number >= most:
            text = f"not executed: a turn can have at most {most} calls"
            return self._failed(call, CallProblem.TOO_MANY, text)
        if call.problem is not None:
            return self._failed(call, CallProblem.UNPARSED, call.problem)
        if call.name not in tools:
            text = f"there is no tool {call.name!r}; tools: {', '.join(tools) or 'none'}"
            return self._failed(call, CallProblem.UNKNOWN_TOOL, text)
        tool = tools[call.name]
        problem = argument_problem(tool.schema, call.arguments)
        if problem is not None:
            return self._failed(call, CallProblem.WRONG_ARGUMENTS, problem)
        async with self._toolbox.slot(call.name):
            started = time.perf_counter()
            result: ToolResult | None = None
            try:
                # A tool may change what it gets. The call may be repeated and is recorded.
                arguments = copy.deepcopy(dict(call.arguments))
                with anyio.move_on_after(tool.timeout_s):
                    result = await self._sessions[call.name].execute(arguments)
            except (InfrastructureError, SlipstreamError):
                raise
            except Exception as error:
                seconds = time.perf_counter() - started
                text = shortened(reason(error))
                return self._failed(call, CallProblem.RAISED, text, seconds)
            seconds = time.perf_counter() - started
        if result is None:
            text = f"{call.name} did not answer within {tool.timeout_s:g} s"
            return self._failed(call, CallProblem.TIMEOUT, text, seconds)
        return result, CallRecord(name=call.name, seconds=seconds)

    def _failed(
        self, call: ToolCall, problem: CallProblem, text: str, seconds: float = 0.0
    ) -> tuple[ToolResult, CallRecord]:
        # Any other name is text that the policy wrote.
        name = call.name if call.name in self._toolbox.tools else UNKNOWN
        record = CallRecord(name=name, problem=problem, seconds=seconds)
        return ToolResult(text=f"Error: {text}"), record


def _cut(text: str, ends: Sequence[int], limit: int, side: TruncateSide) -> str:
    """Return at most `limit` units of a text and a mark where it was cut. `ends` are the indices at
    which the units end."""
    if len(ends) <= limit:
        return text
    half = limit // 2
    first, last = {"left": (0, limit), "right": (limit, 0), "middle": (half, half)}[side]
    before = text[: ends[first - 1]] if first else ""
    after = text[ends[len(ends) - last - 1] :] if last else ""
    marks = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
    return before + marks[side] + after


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
