"""Interactions written for VERL up to 0.7: classes derived from `BaseInteraction`, which play the
user, named in a YAML file.

    interaction:
      - name: teacher
        class_name: my_interactions.Teacher
        config: {}

A row chooses one by `extra_info.interaction_kwargs.name`. `start_interaction` is called before the
first turn, `generate_response` for each turn without tool calls, and `finalize_interaction` at the
end. VERL never calls the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.environment.adapters.settings import load_class, make_object, read_entries
from slipstream.environment.protocol import Answer, Start, Turn, within
from slipstream.environment.tools.function import call_either
from slipstream.environment.tools.protocol import numbers_in
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.types import Prompt

TIMEOUT_S = 600.0
"""Time limit of a call of an interaction, in seconds."""

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


def load_interactions(path: str | Path) -> dict[str, Any]:
    """Return the interactions of a YAML file by name. The default name is the class's in lower
    case, without `Interaction`. Raises ConfigError for entries that cannot be used."""
    found: dict[str, Any] = {}
    for entry in read_entries(path, key=KEY, section="interaction"):
        cls = load_class(entry, key=KEY)
        default = cls.__name__.removesuffix("Interaction").lower()
        name = str(entry.get("name") or default)
        if name in found:
            raise ConfigError(f"{KEY}: there are two interactions of the name {name!r}")
        config = {"name": name, **(entry.get("config") or {})}
        found[name] = make_object(cls, {"config": config}, key=KEY)
    return found


def interaction_of(row: Prompt, interactions: Mapping[str, Any]) -> Any:
    """Return the interaction that a row chooses. Raises DataError if it chooses none of them."""
    name = str((row.extra_info.get("interaction_kwargs") or {}).get("name") or "")
    if name not in interactions:
        known = ", ".join(sorted(interactions))
        hint = did_you_mean(name, interactions) if name else ""
        raise DataError(
            f"row {row.uid}: extra_info.interaction_kwargs.name is {name!r}{hint} (known: "
            f"{known}); each row must name an interaction of {KEY}"
        )
    return interactions[name]


class InteractionEnvironment:
    """An `Environment` of the interaction that the row chooses."""

    def __init__(self, interactions: Mapping[str, Any]) -> None:
        self._interactions = interactions
        self._interaction: Any = None
        self._kwargs: dict[str, Any] = {}
        self._id = str(uuid4())

    async def reset(self, row: Prompt, seed: int) -> Start:
        self._interaction = interaction_of(row, self._interactions)
        self._kwargs = copy.deepcopy(dict(row.extra_info["interaction_kwargs"]))
        self._id = await self._call("start_interaction") or self._id
        return Start()

    async def step(self, turn: Turn) -> Answer:
        messages = copy.deepcopy(list(turn.messages))
        ended, text, score, metrics = await self._call("generate_response", messages)
        return Answer(
            messages=[{"role": "user", "content": str(text)}],
            rewards={} if score is None else {"interaction": float(score)},
            done=bool(ended),
            metrics=numbers_in(metrics),
        )

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the interaction, or await it."""
        function = partial(getattr(self._interaction, method), self._id, *args, **self._kwargs)
        what = f"interaction {method}"
        return await within(TIMEOUT_S, what, lambda: call_either(function))

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        if self._interaction is not None:
            await self._call("finalize_interaction")


class BaseInteraction:
    """The base class of VERL's interactions. A subclass implements `generate_response`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode. Returns the id of its state."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer a turn. Returns whether the episode ends, the answer, the reward of the turn and
        metrics."""
        raise NotImplementedError(f"{type(self).__name__} must implement generate_response")

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """Return a score; the subclass calls it."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End an episode."""
        return
