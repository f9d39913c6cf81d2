"""OpenEnv environments, on a real server: one session per episode, repeated on a new connection if
it is lost."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.build.episodes import make_episodes
from slipstream.data.lookup import build_tokenizer
from slipstream.environment.adapters.openenv import OpenEnvEnvironment
from slipstream.environment.protocol import (
    Answer,
    AssistantMessage,
    CallProblem,
    InfrastructureError,
    Turn,
)
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.agents.verl import AgentLoops
from slipstream.rollout.episode import Episodes
from slipstream.types import Prompt
from tests.build.test_episodes import KEY, config_of
from tests.environment.serving import serving

core = pytest.importorskip(
    "openenv.core", reason="needs openenv, which excludes the extra `mcp`: make openenv"
)

MODULE = "tests.environment.adapters.openenv_server"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(MODULE) as (found, _):
        yield found


class Numbers(core.GenericEnvClient):  # type: ignore[misc,name-defined]
    """A client that turns texts to actions and observations to texts."""

    def action_from_text(self, text: str) -> dict[str, str]:
        return {"message": str(int(text))}

    def text_from_observation(self, observation: dict[str, Any]) -> str:
        return f"{observation['text']}, {observation['tries']}"


def playing(
    make: Callable[[], Any],
    work: Callable[[OpenEnvEnvironment], Awaitable[Any]],
    *,
    seed: int = 3,
    **extra: Any,
) -> Any:
    """Reset an environment, await `work` with it, and return the prompt's text and the result."""

    async def play() -> Any:
        environment = OpenEnvEnvironment(make)
        try:
            start = await environment.reset(Prompt(uid="q", ids=[1], extra_info=extra), seed)
            return start.prompt_text, await work(environment)
        finally:
            await environment.close()

    return anyio.run(play)


async def step(environment: OpenEnvEnvironment, text: str) -> Answer:
    return await environment.step(Turn(message=AssistantMessage(text=text, content=text), number=1))


def secret(seed: int, most: int = 9) -> int:
    return random.Random(seed).randint(0, most)


def wrong(seed: int) -> str:
    return str((secret(seed) + 1) % 10)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_session_is_an_episode_of_the_seed(url: str, seed: int) -> None:
    async def work(environment: OpenEnvEnvironment) -> list[Answer]:
        texts = (wrong(seed), f" {secret(seed)}\n")
        found = [await step(environment, text) for text in texts]
        assert await environment.score() == {}
        return found

    text, (first, last) = playing(lambda: core.GenericEnvClient(base_url=url), work, seed=seed)
    assert text == '\n{"text": "a number from 0 to 9", "tries": 0}'
    assert first.messages == [{"role": "user", "content": '{"text": "wrong", "tries": 1}'}]
    assert (first.rewards, first.done) == ({}, False)
    assert (last.rewards, last.done) == ({"environment": 1.0}, True)


def test_the_client_may_convert_texts(url: str) -> None:
    async def work(environment: OpenEnvEnvironment) -> list[Answer]:
        return [await step(environment, text) for text in (f"0{wrong(3)}", "nothing", "x" * 30)]

    text, (wrong_, nothing, _) = playing(lambda: Numbers(base_url=url), work)
    assert text == "\na number from 0 to 9, 0"
    assert wrong_.messages[0]["content"] == "wrong, 1"
    # What is no action is told to the policy, and the session goes on.
    assert nothing.messages[0]["content"].startswith("Error: ")
    assert "'nothing'" in nothing.messages[0]["content"]
    assert [call.problem for call in nothing.calls] == [CallProblem.WRONG_ARGUMENTS]
    assert not nothing.done


def test_an_action_that_the_server_refuses_is_told_to_the_policy(url: str) -> None:
    async def work(environment: OpenEnvEnvironment) -> list[Answer]:
        return [await step(environment, text) for text in ("x" * 21, str(secret(3)))]

    _, (refused, right) = playing(lambda: core.GenericEnvClient(base_url=url), work)
    assert "VALIDATION_ERROR" in refused.messages[0]["content"]
    assert [call.problem for call in refused.calls] == [CallProblem.WRONG_ARGUMENTS]
    assert right.rewards == {"environment": 1.0}


def test_columns_of_the_row_are_arguments_of_reset(url: str) -> None:
    async def work(environment: OpenEnvEnvironment) -> Answer:
        return await step(environment, str(secret(3, 500)))

    text, answer = playing(lambda: Numbers(base_url=url), work, most=500, seed_="x")
    assert text == "\na number from 0 to 500, 0"
    assert answer.done


def test_an_error_of_the_environment_is_raised(url: str) -> None:
    async def work(environment: OpenEnvEnvironment) -> Answer:
        with pytest.raises(RuntimeError, match="the environment has an error"):
            await step(environment, "raise")
        return await step(environment, str(secret(3)))

    assert playing(lambda: core.GenericEnvClient(base_url=url), work)[1].done


@pytest.mark.parametrize("lost", [wrong(3), "raise"])
def test_a_lost_connection_continues_in_a_new_session(url: str, lost: str) -> None:
    """The client opens a new session silently, which was not reset: its answer does not count."""

    async def work(environment: OpenEnvEnvironment) -> Answer:
        await step(environment, wrong(3))
        await environment._client._ws.close()
        with pytest.raises(InfrastructureError, match="the connection was lost"):
            await step(environment, lost)
        return await step(environment, wrong(3))

    _, answer = playing(lambda: core.GenericEnvClient(base_url=url), work)
    assert answer.messages[0]["content"] == '{"text": "wrong", "tries": 2}'


def test_a_new_session_that_answers_otherwise_fails(url: str) -> None:
    async def work(environment: OpenEnvEnvironment) -> None:
        await step(environment, wrong(3))
        environment._columns["seed"] = next(n for n in range(99) if str(secret(n)) == wrong(3))
        await environment._client._ws.close()
        with pytest.raises(InfrastructureError, match="the connection was lost"):
            await step(environment, wrong(3))
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="another observation"):
                await step(environment, wrong(3))

    playing(lambda: Numbers(base_url=url), work)


def test_a_server_that_goes_away_is_a_failure_of_the_infrastructure() -> None:
    with serving(MODULE) as (url, process):

        async def work(environment: OpenEnvEnvironment) -> None:
            with pytest.raises(InfrastructureError, match=r"OpenEnv: step: .*[Cc]lose"):
                await step(environment, "die")
            process.wait()
            with pytest.raises(InfrastructureError, match=r"OpenEnv: connect: .*127"):
                await step(environment, "1")

        playing(lambda: core.GenericEnvClient(base_url=url), work)


def test_sessions_beyond_the_capacity_are_no_mistakes_of_the_policy(url: str) -> None:
    async def crowd() -> None:
        *first, last = [
            OpenEnvEnvironment(lambda: core.GenericEnvClient(base_url=url)) for _ in range(17)
        ]
        row = Prompt(uid="q", ids=[1])
        for environment in first:
            await environment.reset(row, 3)
        with pytest.raises(InfrastructureError, match="CAPACITY_REACHED"):
            await last.reset(row, 3)
        for environment in [*first, last]:
            await environment.close()

    anyio.run(crowd)


CLIENT = """
from openenv.core import EnvClient


class Typed(EnvClient):
    def _step_payload(self, action): ...
    def _parse_result(self, payload): ...
    def _parse_state(self, payload): ...
"""


def test_the_settings_name_a_client(tmp_path: Path, url: str) -> None:
    environment = f"{KEY}.environment"
    generic = [f"{environment}.path=pkg://openenv.core", f"{environment}.name=GenericEnvClient"]
    given = config_of(*generic, f"{environment}.kwargs.base_url={url}")
    runner = make_episodes(given, build_tokenizer())
    assert isinstance(runner, AgentLoops)
    episodes = runner._others["tool_agent"]
    assert isinstance(episodes, Episodes)
    assert episodes._limits.scores_itself
    made = episodes._make()
    assert isinstance(made, OpenEnvEnvironment)
    assert isinstance(made._make(), core.GenericEnvClient)
    with pytest.raises(DataError, match="base_url"):
        make_episodes(config_of(*generic), build_tokenizer())
    path = tmp_path / "typed.py"
    path.write_text(CLIENT)
    typed = [f"{environment}.path={path}", f"{environment}.name=Typed"]
    with pytest.raises(ConfigError, match="Typed needs a method action_from_text"):
        make_episodes(config_of(*typed), build_tokenizer())
