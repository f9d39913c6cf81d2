"""gymnasium environments with texts: a turn is an action, an observation the answer."""

from __future__ import annotations

from typing import Any

import anyio
import gymnasium

from slipstream.environment.adapters.gymnasium import (
    GymnasiumEnvironment,
    is_gymnasium_environment,
)
from slipstream.environment.adapters.trl import is_trl_environment
from slipstream.environment.protocol import Answer, AssistantMessage, Turn
from slipstream.types import Prompt


class Guess(gymnasium.Env[str, str]):
    """Guess a number from 0 to 9, at most three times."""

    observation_space = gymnasium.spaces.Text(64)
    action_space = gymnasium.spaces.Text(64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret, self.left = int(self.np_random.integers(10)), 3
        return " from 0 to 9", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        right = action.strip() == str(self.secret)
        return "right" if right else "wrong", float(right), right, self.left == 0, {"tries": 1}


def play(seed: int, *actions: str) -> tuple[list[Answer], int]:
    async def work() -> tuple[list[Answer], int]:
        environment = GymnasiumEnvironment(Guess)
        row = Prompt(uid="q", ids=[1])
        start = await environment.reset(row, seed)
        assert start.prompt_text == " from 0 to 9"
        answers = []
        for number, action in enumerate(actions):
            message = AssistantMessage(text=action, content=action)
            answers.append(await environment.step(Turn(message=message, number=number)))
        secret = environment._held.secret
        assert await environment.score() == {}
        await environment.close()
        return answers, secret

    return anyio.run(work)


def test_equal_seeds_give_equal_episodes() -> None:
    assert play(3)[1] == play(3)[1]
    assert len({play(seed)[1] for seed in range(20)}) > 3


def test_steps_have_rewards_and_end_the_episode() -> None:
    secret = play(3)[1]
    (wrong, right), _ = play(3, "no", f" {secret}\n")
    assert (wrong.messages, wrong.rewards, wrong.done) == (
        [{"role": "user", "content": "wrong"}],
        {},
        False,
    )
    assert (right.rewards, right.done, right.metrics) == (
        {"environment": 1.0},
        True,
        {"tries": 1.0},
    )
    assert play(3, "a", "b", "c")[0][-1].done


def test_the_form_is_recognized() -> None:
    assert is_gymnasium_environment(Guess)
    assert not is_trl_environment(Guess)

    class Other:
        def reset(self) -> None: ...
        def step(self, action: str) -> None: ...

    assert not is_gymnasium_environment(Other)
