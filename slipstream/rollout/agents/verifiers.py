"""Environments written for the library `verifiers`, up to 0.3: SingleTurnEnv, ToolEnv and other
classes derived from MultiTurnEnv. `verifiers_v1` has those of its v1 API.

    def load_environment(**kwargs) -> vf.Environment: ...     in a module of the user

The environment's own `rollout` runs. Its client is the policy. The messages of each request must
continue those of the request before: the policy's turns stay as they were sampled, and only new
messages are rendered. The rubric scores the episode. An episode that is stopped begins again later,
and gets its recorded turns without generating them again. Needs the package `verifiers`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio

from slipstream.environment.protocol import AssistantMessage, CallProblem, ToolSchema
from slipstream.environment.tools.protocol import numbers_in
from slipstream.errors import ConfigError
from slipstream.rollout.agents.session import LENGTHS, PolicySession, check_sampling
from slipstream.rollout.episode import (
    TOKENS,
    TOOL_SECONDS,
    EpisodeError,
    Generate,
    count_problem,
)
from slipstream.rollout.render import Renderer
from slipstream.types import Message, Prompt, Sample, Status

LOAD_ENVIRONMENT = "load_environment"
"""The conventional name of the function that makes an environment."""

ROW = "verifiers"
"""The key of `extra_info` with a row of the environment's data set."""

KIND = "environment"

NAME = "policy"
"""The name of the model that environments see."""

_IGNORED = ("n", "extra_body")
"""Sampling arguments of an environment that have no effect."""


def is_verifiers_environment(found: Any) -> bool:
    """Return whether an object is derived from `Environment` of verifiers, or has tasks."""
    return has_tasks(found) or _is_derived(found, "Environment", "verifiers")


def has_tasks(found: Any) -> bool:
    """Return whether an object is derived from `Env` or `Taskset` of verifiers' v1 API."""
    return any(_is_derived(found, name, "verifiers.v1") for name in ("Env", "Taskset"))


def _is_derived(found: Any, name: str, package: str) -> bool:
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{package}.")
        for base in type(found).__mro__
    )


@contextlib.contextmanager
def without_signal_handlers() -> Iterator[None]:
    """Let nothing install signal handlers in the body.

    The constructor of an environment does, which would replace the run's own handler of Ctrl-C, and
    fails outside of the main thread.
    """
    install = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install


def write_rows(environment: Any, path: str | Path, *, split: str = "train", count: int = -1) -> int:
    """Write the rows of an environment's data set to a JSONL file, for `data.train_files`
    (`split="train"`) or `data.val_files` (`split="eval"`). `count` limits their number; -1: all.
    With the v1 API, `environment` may be a taskset, whose tasks have no splits.

    Returns the number of rows. Raises ConfigError for a split of a taskset, and for all tasks of an
    infinite one.
    """
    if has_tasks(environment):
        taskset = getattr(environment, "taskset", environment)
        kind, rows = type(taskset), _tasks(taskset, split, count)
        # A file of the user has a module name that depends on its folder.
        name = kind.__name__ if taskset.config.id == kind.__module__ else taskset.config.id
    else:
        get = {"train": environment.get_dataset, "eval": environment.get_eval_dataset}[split]
        name = environment.env_id
        rows = [(row["prompt"], row["example_id"], dict(row)) for row in get(n=count)]
    with Path(path).open("w", encoding="utf-8") as file:
        for prompt, index, row in rows:
            line = {
                "data_source": name or "verifiers",
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": row.get("answer", "")},
                "extra_info": {"index": index, ROW: row},
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(rows)


def _tasks(taskset: Any, split: str, count: int) -> list[tuple[list[Message], int, dict[str, Any]]]:
    """Prompt, index and data of the tasks of a taskset."""
    from verifiers.v1.dialects.chat import message_to_wire

    kind = type(taskset).__name__
    if split != "train":
        raise ConfigError(
            f"{kind} of verifiers has no split {split!r}; pass another taskset, without `split`"
        )
    if taskset.INFINITE and count < 0:
        raise ConfigError(f"{kind} of verifiers is infinite; set `count`")
    rows = []
    for index, task in enumerate(taskset if count < 0 else taskset.head(count)):
        data, messages = task.data, task.data.prompt
        if isinstance(messages, str | None):
            messages = [{"role": "user", "content": messages or ""}]
        else:
            messages = [message_to_wire(message) for message in messages]
        if data.system_prompt:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        rows.append((messages, index, data.model_dump(mode="json")))
    return rows


class PolicyEpisodes(ABC):
    """Runs episodes of one environment, which they share and whose client is the policy."""

    def __init__(
        self,
        environment: Any,
        renderer: Renderer,
        *,
        sampling_params: Mapping[str, Any],
        max_tokens: int,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`max_tokens` limits the tokens after the prompt."""
        self._environment = environment
        self._renderer = renderer
        self._params = dict(sampling_params)
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue one that was stopped (see `EpisodeRunner`)."""
        session = PolicySession(
            sample,
            generate,
            kind=KIND,
            max_tokens=self._max_tokens,
            max_prompt_tokens=self._max_prompt_tokens,
        )
        policy = ChatPolicy(session, sample, self._renderer, self._params)
        return await session.run("verifiers", lambda: self._play(sample, row, policy))

    @abstractmethod
    async def _play(self, sample: Sample, row: Prompt, policy: ChatPolicy) -> None:
        """Run an episode to its end, and write its score to the record."""

    async def discard(self, sample: Sample) -> None:
        return None

    async def close(self) -> None:
        return None


class VerifiersEpisodes(PolicyEpisodes):
    """Runs episodes of an environment derived from `Environment`."""

    def __init__(self, environment: Any, renderer: Renderer, **options: Any) -> None:
        """`options` are those of `PolicyEpisodes`. Raises ConfigError for a rubric that scores
        whole groups, and DataError for a chat template that cannot append turns."""
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"{type(environment).__name__} of verifiers has reward functions of whole groups "
                "(parameters such as `completions`); use functions of one rollout"
            )
        super().__init__(environment, renderer, **options)
        schemas = [schema_of(tool) for tool in environment.tool_defs or []]
        if schemas or getattr(environment, "max_turns", -1) != 1:
            renderer.check(schemas, results=bool(schemas))

    async def _play(self, sample: Sample, row: Prompt, policy: ChatPolicy) -> None:
        from verifiers.errors import InfraError

        environment, record = self._environment, policy.session.record
        started = time.monotonic()
        state = await environment.rollout(_input(row), _client(policy), NAME, {})
        if policy.failed is not None:
            raise policy.failed
        if isinstance(state["error"], InfraError):
            raise state["error"]
        policy.session.check_replayed()
        if state.get("timed_out"):
            cut_to_turn(sample)
        if record.turns == 0:
            why = state["error"] or state.get("stop_condition")
            raise EpisodeError(f"the episode ended without a turn of the policy ({why})")
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        record.tool_seconds = time.monotonic() - started - policy.seconds
        record.score = float(state["reward"])
        if not math.isfinite(record.score):
            raise EpisodeError(f"the reward is {record.score}")
        record.metrics = numbers_in(state["metrics"])
        if state.get("timed_out"):
            sample.status, record.truncated_by = Status.TRUNCATED, TOOL_SECONDS
        elif sample.status is Status.TRUNCATED:
            record.truncated_by = TOKENS


def cut_to_turn(sample: Sample) -> None:
    """Leave out what follows the last turn of the policy that is complete."""
    while len(sample.segments) > 1:
        last = sample.segments[-1]
        if last.role == "assistant" and last.ids:
            return
        sample.segments[-1:] = []


def _input(row: Prompt) -> dict[str, Any]:
    """The row as the environment's data set has it; the columns of other data as far as known."""
    given = row.extra_info.get(ROW)
    if given is not None:
        return copy.deepcopy(dict(given))
    return {
        "prompt": copy.deepcopy(row.messages),
        "answer": "" if row.ground_truth is None else row.ground_truth,
        "info": copy.deepcopy(row.extra_info),
        "example_id": row.extra_info.get("index", 0),
    }


class ChatPolicy:
    """The policy of one episode. It continues a conversation."""

    def __init__(
        self,
        session: PolicySession,
        sample: Sample,
        renderer: Renderer,
        params: Mapping[str, Any],
    ) -> None:
        self.session = session
        self._params = params
        self.failed: Exception | None = None
        """Why the episode cannot continue. Environments keep exceptions to themselves."""
        self.seconds = 0.0
        """Seconds in which turns were generated."""
        self._sample = sample
        self._renderer = renderer
        self.known: list[Message] = []
        """The conversation up to the policy's last turn, as the environment has it."""
        self._last: AssistantMessage | None = None

    async def turn(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], params: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Generate the turn after `messages`. Returns the fields of a `Response` of verifiers, or
        None if no token fits."""
        started = time.monotonic()
        try:
            return await self._turn(list(messages), tools, params)
        except Exception as error:
            self.failed = error
            raise
        finally:
            self.seconds += time.monotonic() - started

    async def _turn(
        self, messages: list[Message], tools: Sequence[ToolSchema], params: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        prompt = self._prompt(messages, tools)
        check_sampling(params, self._params, kind=KIND, ignored=())
        asked = [int(params[name]) for name in LENGTHS if params.get(name)]
        turn = await self.session.turn(prompt, min(asked, default=None))
        if turn is None or not turn.ids:
            return None
        self._last = self._renderer.parse(turn.ids, tools)
        message = _message(self._last)
        self.known = [*messages, message]
        record = self.session.record
        for call in self._last.tool_calls:
            record.calls += 1
            if call.problem is not None:
                count_problem(record, CallProblem.UNPARSED)
        truncated = self._sample.status is Status.TRUNCATED
        ends = "tool_calls" if "tool_calls" in message else "stop"
        written, ids = list(turn.ids), prompt
        return {
            "id": f"turn{record.turns}",
            "created": 0,
            "model": NAME,
            "usage": {
                "prompt_tokens": len(ids),
                "reasoning_tokens": 0,
                "completion_tokens": len(written),
                "total_tokens": len(ids) + len(written),
            },
            "message": {
                **message,
                "finish_reason": "length" if truncated else ends,
                "is_truncated": truncated,
                "tokens": {
                    "prompt_ids": ids,
                    "prompt_mask": [0] * len(ids),
                    "completion_ids": written,
                    "completion_mask": [1] * len(written),
                    "completion_logprobs": list(turn.log_probs),
                },
            },
        }

    def _prompt(self, messages: list[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of all messages: those of earlier requests, then of new messages."""
        if self._last is None:
            return self._renderer.prompt([_rendered(one, {}) for one in messages], tools)
        known = len(self.known)
        new = messages[known:]
        if messages[:known] != self.known or not new:
            raise EpisodeError(
                f"the messages of turn {self.session.record.turns + 1} do not continue those of "
                "the turn before; an environment must append to them, and never change or leave "
                "out earlier ones"
            )
        if any(message["role"] == "assistant" for message in new):
            raise EpisodeError("the environment wrote a message of the assistant after a turn")
        names = {call.id: call.name for call in self._last.tool_calls}
        end, ids = self._renderer.extend(self._last, [_rendered(one, names) for one in new], tools)
        tokens = self._sample.tokens
        ended = tokens[-1] in self._renderer.end_token_ids
        return [*tokens, *([] if ended else [end]), *ids]


def _message(turn: AssistantMessage) -> Message:
    """A turn as a message of verifiers. Calls that cannot be parsed stay in the text."""
    calls = [call for call in turn.tool_calls if call.problem is None]
    broken = bool(turn.tool_calls) and not calls
    message: Message = {"role": "assistant", "content": turn.text if broken else turn.content}
    if turn.reasoning is not None and not broken:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": json.dumps(dict(call.arguments))}
            for call in calls
        ]
    return message


def _rendered(message: Message, names: Mapping[str, str]) -> Message:
    """A message of verifiers as the chat template reads it. `names` has tools by call id."""
    if message["role"] == "text":
        raise EpisodeError("the prompt is plain text; give it as messages")
    if calls := message.get("tool_calls"):
        functions = [
            {"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls
        ]
        listed = [
            {"id": call["id"], "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
        return {**message, "tool_calls": listed}
    if (name := names.get(message.get("tool_call_id", ""))) is not None:
        return {"name": name, **message}
    return message


def schema_of(tool: Any) -> ToolSchema:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _client(policy: ChatPolicy) -> Any:
    return _client_class()(policy)


@cache
def _client_class() -> Any:
    """A `Client` of verifiers whose native client is a `ChatPolicy`."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response

    class PolicyClient(Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> Any:
            raise ConfigError("the client of a run cannot be made from a configuration")

        async def to_native_tool(self, tool: Any) -> ToolSchema:
            return schema_of(tool)

        async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
            return [message.model_dump(exclude_none=True) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any
        ) -> dict[str, Any] | None:
            given = {name: value for name, value in sampling_args.items() if name not in _IGNORED}
            if "max_completion_tokens" in given:
                given["max_tokens"] = given.pop("max_completion_tokens")
            found: dict[str, Any] | None = await self.client.turn(prompt, tools or [], given)
            return found

        async def raise_from_native_response(self, response: Any) -> None:
            if response is None:
                raise OverlongPromptError

        async def from_native_response(self, response: Any) -> Any:
            return Response.model_validate(response)

        async def close(self) -> None:
            return None

    return PolicyClient
