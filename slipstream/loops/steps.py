"""When a training loop saves a checkpoint."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    """The settings that the RL and SFT loops share."""

    @property
    def num_steps(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...


def checkpoint_due(step: int, config: Counts) -> bool:
    """True if a loop saves a checkpoint after `step`."""
    return step % config.checkpoint_every == 0 or step == config.num_steps
