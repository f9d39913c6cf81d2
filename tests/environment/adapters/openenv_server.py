"""An OpenEnv server for tests: `python -m tests.environment.adapters.openenv_server PORT`."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):  # type: ignore[misc]
    message: str = Field(max_length=20)


class Hint(Observation):  # type: ignore[misc]
    text: str
    tries: int = 0


class GuessEnvironment(Environment):  # type: ignore[misc]
    """Guess a number from 0 to `most`, at most three times."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._tries = 0, 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, most: int = 9, **_: Any
    ) -> Hint:
        self._secret, self._tries = random.Random(seed).randint(0, most), 0
        return Hint(text=f"a number from 0 to {most}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.message == "die":
            os._exit(3)
        if action.message == "raise":
            raise KeyError("the environment has an error")
        self._tries += 1
        right = action.message.strip() == str(self._secret)
        done = right or self._tries == 3
        return Hint(
            text="right" if right else "wrong", tries=self._tries, reward=float(right), done=done
        )

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=16)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
