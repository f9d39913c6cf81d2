"""Counting steps, for both training loops."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    """What the configurations of the loops have in common."""

    @property
    def num_steps(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...


def checkpoint_due(step: int, config: Counts) -> bool:
    """Whether a loop calls its `save` after `step`."""
    return step % config.checkpoint_every == 0 or step == config.num_steps
