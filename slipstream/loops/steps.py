"""Counting steps, for both training loops."""

from __future__ import annotations

from typing import Protocol

from slipstream.errors import ConfigError


class Counts(Protocol):
    """What the configurations of the loops have in common."""

    @property
    def num_steps(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...


def checkpoint_due(step: int, config: Counts) -> bool:
    """Whether a loop calls its `save` after `step`."""
    return step % config.checkpoint_every == 0 or step == config.num_steps


def check_at_least_one(config: object, *names: str) -> None:
    """Raises ConfigError for a count below 1; None is no count."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
