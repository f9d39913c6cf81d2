"""Environments written for TRL run as they are."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from slipstream.environment.adapters.trl import TrlFactory, is_trl_environment
from slipstream.environment.protocol import AssistantMessage, ToolCall, Turn
from slipstream.environment.tools.environment import ToolLimits
from slipstream.errors import ConfigError
from slipstream.types import Prompt

ROW = Prompt(uid="q", ids=[1], messages=[{"role": "user", "content": "hi"}], ground_truth="4")
ROW.extra_info = {"secret": 7}


class Game:
    """Guess a number."""

    made = 0

    def __init__(self) -> None:
        Game.made += 1
        self.reward = 0.0

    def reset(self, secret: int = 0, **row: Any) -> str | None:
        self.secret, self.reward, self.row = secret, 0.0, row
        return " Guess!"

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether it is right.
        """
        if number < 0:
            raise ValueError("the number is not negative")
        self.reward = float(number == self.secret)
        return "right" if self.reward else "wrong"

    def get_reward(self) -> float:
        return self.reward

    def _helper(self) -> None: ...


def turn(number: int) -> Turn:
    call = ToolCall(id="a", name="guess", arguments={"number": number})
    return Turn(message=AssistantMessage(text="", tool_calls=(call,)), number=1)


def play(factory: TrlFactory, *numbers: int) -> tuple[list[str], dict[str, float]]:
    async def work() -> tuple[list[str], dict[str, float]]:
        environment = factory()
        start = await environment.reset(ROW, 0)
        assert (start.prompt_text, list(start.tools)) == (" Guess!", factory.schemas)
        answers = []
        for count, number in enumerate(numbers):
            given = turn(number)
            answer = await environment.step(Turn(message=given.message, number=count))
            answers.append(answer.messages[0]["content"])
        score = dict(await environment.score())
        await environment.close()
        return answers, score

    return anyio.run(work)


def test_public_methods_are_tools_and_get_reward_is_the_reward() -> None:
    factory = TrlFactory(Game, ToolLimits())
    assert [schema["function"]["name"] for schema in factory.schemas] == ["guess"]
    answers, score = play(factory, 3, -1, 7)
    assert answers == ["wrong", "Error: ValueError: the number is not negative", "right"]
    assert score == {"Game": 1.0}
    assert factory.gives_reward


def test_objects_are_used_again() -> None:
    Game.made = 0
    factory = TrlFactory(Game, ToolLimits())
    for _ in range(3):
        assert play(factory, 3)[1] == {"Game": 0.0}
    assert Game.made == 1


def test_two_episodes_at_once_have_objects_of_their_own() -> None:
    async def work() -> bool:
        factory = TrlFactory(Game, ToolLimits())
        one, other = factory(), factory()
        await one.reset(ROW, 0)
        await other.reset(ROW, 0)
        return one._held is not other._held

    assert anyio.run(work)


@pytest.mark.parametrize("wrong", ["reset", "late"])
def test_an_object_is_not_used_again_after_something_went_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.environment.adapters.trl.TIMEOUT_S", 0.1)

    class Odd(Game):
        def reset(self, secret: int = 0, **row: Any) -> str | None:
            if wrong == "reset":
                raise OSError("dead")
            return super().reset(secret, **row)

        def guess(self, number: int) -> str:
            """Guess the number.

            Args:
                number: The guess.
            """
            time.sleep(0.3)
            return ""

    factory = TrlFactory(Odd, ToolLimits())

    async def work() -> None:
        environment = factory()
        if wrong == "reset":
            with pytest.raises(OSError, match="dead"):
                await environment.reset(ROW, 0)
        else:
            await environment.reset(ROW, 0)
            await environment.step(turn(3))
        await environment.close()

    anyio.run(work)
    assert factory._free == []


def test_reset_may_name_only_the_columns_that_it_needs() -> None:
    class Few(Game):
        def reset(self, ground_truth: str) -> str | None:  # type: ignore[override]
            return f" {ground_truth}"

    async def work() -> str:
        return (await TrlFactory(Few, ToolLimits())().reset(ROW, 0)).prompt_text

    assert anyio.run(work) == " 4"


def test_reset_gets_the_columns_of_the_row() -> None:
    factory = TrlFactory(Game, ToolLimits())
    play(factory, 1)
    assert factory._free[0].row["ground_truth"] == "4"
    assert factory._free[0].row["prompt"] == ROW.messages


@pytest.mark.parametrize(
    ("found", "text"),
    [(None, ""), ("a", "a"), ([{"type": "text", "text": "a"}, "b"], "ab")],
)
def test_reset_may_return_nothing_a_text_or_parts(found: Any, text: str) -> None:
    class Other(Game):
        def reset(self, secret: int = 0, **row: Any) -> Any:
            return found

    async def work() -> str:
        return (await TrlFactory(Other, ToolLimits())().reset(ROW, 0)).prompt_text

    assert anyio.run(work) == text


def test_another_value_of_reset_is_a_failure() -> None:
    class Other(Game):
        def reset(self, secret: int = 0, **row: Any) -> Any:
            return 3

    with pytest.raises(TypeError, match="int"):
        anyio.run(TrlFactory(Other, ToolLimits())().reset, ROW, 0)


def test_a_class_without_tools_is_refused() -> None:
    class Empty:
        def reset(self, **row: Any) -> None: ...

    assert is_trl_environment(Game)
    assert not is_trl_environment(Empty)
    assert not is_trl_environment(Game())
    with pytest.raises(ConfigError, match="tool"):
        TrlFactory(Empty, ToolLimits())
