"""Tasksets and environments of the v1 API of the library `verifiers` (0.3).

    def load_environment(**kwargs) -> vf.Taskset | vf.Env: ...     in a module of the user

One agent plays a task: its harness, a program or a function, sends requests to an HTTP server in
this process, and the server asks the policy. The rules of `verifiers` apply: requests must continue
each other, and an episode that is stopped begins again later, with its recorded turns. The server
belongs to an event loop; its episodes share it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import anyio

from slipstream.environment.tools.protocol import numbers_in
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.agents.session import EpisodeStopped
from slipstream.rollout.agents.verifiers import (
    NAME,
    ROW,
    ChatPolicy,
    PolicyEpisodes,
    cut_to_turn,
    schema_of,
)
from slipstream.rollout.episode import TOKENS, TOOL_SECONDS, EpisodeError
from slipstream.rollout.render import Renderer
from slipstream.types import Message, Prompt, Sample, Status

_KEY = "actor_rollout_ref.rollout.multi_turn.environment"

_CLOSE_S = 60.0
"""Time limit for an agent that is stopped to release its runtime, in seconds."""

_SCORED = ("TaskError", "HarnessError")
"""Errors that the policy may have caused. All others are of the infrastructure."""

_TIMEOUT = "agent timeout"
"""How the message of a HarnessError begins if the agent was too slow."""

_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}
"""Sampling parameters of a request that change nothing if they have these values."""

_IGNORED = ("seed", "top_logprobs", "service_tier")
"""Sampling parameters of a request that have no effect."""


class TaskEpisodes(PolicyEpisodes):
    """Runs episodes of one taskset or environment."""

    def __init__(self, found: Any, renderer: Renderer, **options: Any) -> None:
        """`found` is a taskset or an environment; `options` are those of `PolicyEpisodes`. Raises
        ConfigError for an environment with several agents and for a taskset without id, and
        DataError for a chat template that cannot append turns."""
        super().__init__(_environment_of(found), renderer, **options)
        renderer.check([], results=False)
        self._servers: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None

    async def close(self) -> None:
        """Stop the servers of the running event loop. Those of a loop that has ended are gone."""
        servers, self._servers = self._servers, None
        if servers is not None and not servers.done():
            servers.cancel()
            await asyncio.wait((servers,))

    async def _play(self, sample: Sample, row: Prompt, policy: ChatPolicy) -> None:
        task, started = self._task(row), time.monotonic()
        environment, episode = await self._served(), _Episode(policy)
        _EPISODE.set(episode)
        played = await episode.result_of(environment.run_episode(task, _context()))
        errors = [*played.errors]
        if len(played.traces) > 1:
            raise _several_runs()
        trace = played.traces[0] if played.traces else None
        if trace is not None and not trace.ok and trace.last_error.type not in _SCORED:
            errors.append(trace.last_error)
        if trace is None or errors:
            raise EpisodeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        record = policy.session.record
        policy.session.check_replayed()
        cut_to_turn(sample)  # the agent may have ended in a turn
        why = trace.last_error
        if record.turns == 0:
            said = f"{why.type}: {why.message}" if why else trace.stop_condition
            raise EpisodeError(f"the episode ended without a turn of the policy ({said})")
        record.tool_seconds = time.monotonic() - started - policy.seconds
        record.score = float(trace.reward)
        if not math.isfinite(record.score):
            raise EpisodeError(f"the reward is {record.score}")
        rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
        record.metrics = numbers_in({**rewards, **trace.metrics})
        if why is not None and why.message.startswith(_TIMEOUT):
            sample.status, record.truncated_by = Status.TRUNCATED, TOOL_SECONDS
        elif sample.status is Status.TRUNCATED:
            record.truncated_by = TOKENS

    def _task(self, row: Prompt) -> Any:
        taskset, given = self._environment.taskset, row.extra_info.get(ROW)
        kind, remedy = type(taskset).task_type(), f"write the rows with {__package__}.verifiers"
        if given is None:
            raise DataError(f"a row has no extra_info.{ROW}; {remedy}.write_rows")
        try:
            data = kind.data_type().model_validate(copy.deepcopy(given))
        except ValueError as error:
            raise DataError(
                f"extra_info.{ROW} of a row does not fit {type(taskset).__name__}: {error}; "
                f"{remedy}.write_rows again"
            ) from error
        return kind(data, taskset.config.task)

    async def _served(self) -> Any:
        """The environment with the servers of the running event loop, which starts them once and
        stops them when it ends."""
        if self._servers is None or self._servers.done():
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._servers = loop.create_task(self._serve(self._ready))
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def _serve(self, ready: asyncio.Future[Any]) -> None:
        try:
            async with _serving(self._environment) as environment:
                ready.set_result(environment)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


class _Episode:
    """One episode: the policy, and what ends the agent's run before its time."""

    def __init__(self, policy: ChatPolicy) -> None:
        self._policy = policy
        self._ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._agents = 0
        self._writes = False

    def end(self, error: BaseException) -> None:
        """End the agent's run because of an error."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def result_of(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of the run, or raise the error that ended it. Cancels the run in the
        second case, and if this call is cancelled."""
        run = asyncio.ensure_future(work)
        try:
            await asyncio.wait((run, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.cancel()
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await asyncio.wait((run,))
        if self._ended.done():
            raise self._ended.result()
        return run.result()

    def add_agent(self) -> None:
        """Count an agent that is about to run. Ends the episode, and raises ConfigError, if it is
        the second one."""
        self._agents += 1
        if self._agents > 1:
            self.end(error := _several_runs())
            raise error

    async def turn(self, dialect: Any, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Generate the turn that a request asks for. Returns what `ChatPolicy.turn` returns."""
        if self._writes:
            raise EpisodeError("the harness asked for two turns at the same time")
        self._writes = True
        try:
            request = dialect.parse_request(body)
            messages = [_plain(message) for message in request.messages]
            for place, (known, got) in enumerate(zip(self._policy.known, messages, strict=False)):
                # Many harnesses leave out the reasoning of earlier turns. Its tokens stay.
                if known == {"reasoning_content": known.get("reasoning_content"), **got}:
                    messages[place] = known
            tools = [schema_of(tool) for tool in request.tools or []]
            return await self._policy.turn(messages, tools, _params(dialect, body))
        finally:
            self._writes = False


def _several_runs() -> ConfigError:
    return ConfigError(
        f"{_KEY}: the environment ran agents more than once in an episode, which has one "
        "conversation; return an environment that runs one agent once, without retries, such as "
        "SingleAgentEnv of verifiers"
    )


_EPISODE: ContextVar[_Episode] = ContextVar("episode")
"""The episode in whose context an agent asks for a client."""


def _plain(message: Any) -> Message:
    """A message of verifiers in the form of those that `ChatPolicy` keeps."""
    found = message.model_dump(exclude_none=True, exclude={"provider_state"})
    for call in found.get("tool_calls", ()):
        del call["type"]
        call["arguments"] = json.dumps(json.loads(call["arguments"]))  # spaces may differ
    return {"content": "", **found}


def _params(dialect: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a request that may change what is sampled."""
    given = {
        name: body[name]
        for name in sorted(dialect.sampling_fields)
        if body.get(name) is not None
        and name not in _IGNORED
        and (name not in _NEUTRAL or body[name] != _NEUTRAL[name])
    }
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    return given


def _environment_of(found: Any) -> Any:
    """The environment, or one that lets the default agent of verifiers play a taskset."""
    from verifiers.v1 import (
        AgentConfig,
        Env,
        SingleAgentEnv,
        SingleAgentEnvConfig,
        SubprocessConfig,
    )
    from verifiers.v1.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, harness_class

    kind = type(found).__name__
    if isinstance(found, Env):
        if len(agents := agent_config_fields(found.config)) > 1:
            raise ConfigError(
                f"{_KEY}: {kind} of verifiers has the agents {', '.join(agents)}; return an "
                "environment with one agent, such as SingleAgentEnv"
            )
        return found
    if not found.config.id:
        raise ConfigError(
            f"{_KEY}: {kind} has no id, by which verifiers finds its harness; return an "
            "environment, or a taskset whose TasksetConfig has the id of its module: id=__name__"
        )
    harness = harness_class(default_harness_id(found.config.id))
    agent = AgentConfig()
    if not (harness.EXECUTES_CODE or harness.NEEDS_CONTAINER):
        agent = AgentConfig(runtime=SubprocessConfig())  # it needs no isolation
    environment = SingleAgentEnv(SingleAgentEnvConfig(taskset=found.config, agent=agent))
    environment.taskset = found
    return environment


def _context() -> Any:
    """The model and sampling of an agent. Its client is `PolicyClient`, whatever is said here."""
    from verifiers.v1 import EvalClientConfig, ModelContext

    client = EvalClientConfig(base_url="http://localhost", api_key_var="NONE")
    return ModelContext(model=NAME, client=client)


@asynccontextmanager
async def _serving(environment: Any) -> AsyncIterator[Any]:
    """A copy of an environment whose servers run: `Env.serving`, with a server of ours."""
    from verifiers.v1.interception import InterceptionServerConfig

    served, config = copy.copy(environment), environment.config.interception
    async with served.shared_tools() as tools:
        server = _server_class()(
            config if isinstance(config, InterceptionServerConfig) else None,
            served._requires_tunnel(tools),
            [tool.state_secret for tool in tools.values() if tool.state_secret],
        )
        async with server:
            served._shared_tools, served._interception = tools, server
            try:
                await served.start()
                yield served
            finally:
                await served.stop()


@cache
def _server_class() -> Any:
    """An interception server of verifiers whose clients ask the policy."""
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.train import serialize_completion
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import OverlongPromptError, ProviderError
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.types import Response

    class PolicyClient(Client):  # type: ignore[misc]
        def __init__(self, episode: _Episode) -> None:
            self._episode = episode

        async def get_response(
            self, dialect: Any, body: dict[str, Any], *_: Any, **options: Any
        ) -> Any:
            try:
                if not isinstance(dialect, ChatDialect):
                    raise self._refused(type(dialect).__name__)
                turn = await self._episode.turn(dialect, body)
            except (Exception, EpisodeStopped) as error:
                raise self._end(error) from None
            if turn is None:
                raise OverlongPromptError
            of_message = turn["message"]
            response = Response.model_validate(
                {
                    **turn,
                    "finish_reason": of_message["finish_reason"],
                    "tokens": of_message["tokens"],
                }
            )
            response.raw = serialize_completion(response, NAME)
            return response

        async def relay(self, *_: Any, **options: Any) -> Any:
            raise self._end(self._refused("a streamed answer"))

        async def relay_aux(self, dialect: Any, *_: Any, **options: Any) -> Any:
            raise self._end(self._refused(type(dialect).__name__))

        def _refused(self, what: str) -> ConfigError:
            return ConfigError(
                f"{_KEY}: the harness asked for {what}, which is not supported; use a harness that "
                "asks for chat completions without streaming, such as bash or null of verifiers"
            )

        def _end(self, error: BaseException) -> ProviderError:
            """End the agent's run. The server answers the request with what this returns."""
            self._episode.end(error)
            return ProviderError(f"the episode has ended: {error}")

    class PolicyServer(InterceptionServer):  # type: ignore[misc]
        def _client(self, config: Any) -> Any:
            episode = _EPISODE.get()
            episode.add_agent()
            return PolicyClient(episode)

    return PolicyServer
