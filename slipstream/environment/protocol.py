"""The interface of environments: what an episode acts on, turn by turn.

    reset(row, seed) -> Start        messages added to the prompt, and the tools
    step(turn)       -> Answer       messages for the policy, rewards, and whether the episode ends
    score()          -> rewards      of the whole episode, at its end
    close()                          releases what the episode holds

An environment reads and writes chat messages. It does not know token ids, engines or training. Each
episode has its own environment. Called by `rollout.episode`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import anyio

from slipstream.types import Message, Prompt

T = TypeVar("T")

ToolSchema = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description",
"parameters"}}`."""


class CallProblem(StrEnum):
    """Why a tool call could not be answered normally. The policy gets a text about the problem, and
    the episode continues."""

    UNPARSED = "unparsed"
    """The call is not valid in the call format, for example broken JSON."""
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    """The arguments do not fit the tool's schema."""
    RAISED = "raised"
    """The tool raised an exception."""
    TIMEOUT = "timeout"
    """The tool exceeded its own time limit."""
    TOO_MANY = "too_many"
    """The turn has more calls than `max_parallel_calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote. `problem` says why it cannot be parsed; None if it can."""

    id: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """A turn of the policy, parsed.

    `content` is the text without reasoning and calls. `text` is the whole text, with control
    tokens, without the token that ended the turn.
    """

    text: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()

    def as_message(self) -> Message:
        """The turn as a chat message, as templates of transformers expect it. Calls that could not
        be parsed are left out."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": deepcopy(dict(call.arguments))},
            }
            for call in self.tool_calls
            if call.problem is None
        ]
        if calls:
            message["tool_calls"] = calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the policy, for `Environment.step`. `number` counts from 1. `messages` are the
    whole conversation so far; the last one is this turn."""

    message: AssistantMessage
    number: int
    messages: Sequence[Message] = ()


class InfrastructureError(Exception):
    """A failure that the policy did not cause, such as a tool server that does not answer. The call
    is repeated, and at last the sample fails and is not trained on."""


async def within(seconds: float, what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`. Raises InfrastructureError, which names `what`, if it takes longer than
    `seconds`."""
    with anyio.move_on_after(seconds):
        return await call()
    raise InfrastructureError(f"{what}: no answer within {seconds:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What became of one tool call. `seconds` is the time of the tool, without waiting for it to be
    free."""

    name: str
    problem: CallProblem | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The answer of `reset`: text to add to the last message of the prompt, messages to add to the
    prompt, and the tools."""

    prompt_text: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of `step`: messages for the policy, and the reward of the turn.

    `rewards` are the parts of the reward by name; their sum counts. `calls` has one record per tool
    call. `metrics` are added up over the turns, and averaged over episodes in the log. The messages
    are not used if `done`.
    """

    messages: Sequence[Message] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    calls: Sequence[CallRecord] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The environment of one episode. Mistakes of the policy are answers.

    After an `InfrastructureError` a call is repeated several times, after another exception once.
    Then the sample fails, unless `step` raised the other exception: the episode ends as truncated
    and is scored, so that a policy cannot avoid a reward by crashing its environment.
    """

    async def reset(self, row: Prompt, seed: int) -> Start:
        """Begin an episode for a row of the data set. Equal arguments must give equal episodes."""
        ...

    async def step(self, turn: Turn) -> Answer:
        """Answer a turn of the policy."""
        ...

    async def score(self) -> Mapping[str, float]:
        """Return the rewards of the whole episode by name. Called before `close`, unless the
        episode failed."""
        ...

    async def close(self) -> None:
        """Release everything. Called exactly once, also after a failure or a cancellation."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""
