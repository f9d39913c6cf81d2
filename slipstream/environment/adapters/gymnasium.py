"""gymnasium environments whose observations and actions are texts.

A turn of the policy is an action. The observation is the answer of a user. The rewards of the steps
are rewards of the turns. The environment ends the episode if it is terminated or truncated.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slipstream.environment.protocol import Answer, Start, Turn, within
from slipstream.environment.tools.function import call_either
from slipstream.environment.tools.protocol import numbers_in
from slipstream.types import Prompt

TIMEOUT_S = 600.0
"""Time limit of the constructor, `reset` and `step`, in seconds."""


def is_gymnasium_environment(cls: Any) -> bool:
    """Return whether a class has gymnasium's form: `reset`, a `step` that is no coroutine, and
    spaces."""
    step = getattr(cls, "step", None)
    return (
        inspect.isclass(cls)
        and callable(getattr(cls, "reset", None))
        and callable(step)
        and not inspect.iscoroutinefunction(step)
        and any(base.__module__.partition(".")[0] == "gymnasium" for base in cls.__mro__)
    )


class GymnasiumEnvironment:
    """An `Environment` of one gymnasium object."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._held: Any = None

    async def reset(self, row: Prompt, seed: int) -> Start:
        if self._held is None:
            self._held = await within(TIMEOUT_S, "constructor", partial(call_either, self._make))
        options = copy.deepcopy(row.extra_info)
        reset = partial(call_either, self._held.reset, seed=seed, options=options)
        observation, _ = await within(TIMEOUT_S, "reset", reset)
        return Start(prompt_text=str(observation))

    async def step(self, turn: Turn) -> Answer:
        step = partial(call_either, self._held.step, turn.message.content)
        found = await within(TIMEOUT_S, "step", step)
        observation, reward, terminated, truncated, info = found
        return Answer(
            messages=[{"role": "user", "content": str(observation)}],
            rewards={"environment": float(reward)} if reward else {},
            done=bool(terminated or truncated),
            metrics=numbers_in(info),
        )

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        if self._held is not None:
            await call_either(self._held.close)
