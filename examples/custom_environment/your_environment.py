"""A walker on a line: it stands somewhere, wants to be elsewhere, and steps `+` or `-`.

Stands for an environment of your own: states, and what an action in a state is worth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ACTIONS = ("+", "-")


@dataclass(frozen=True, slots=True)
class State:
    """Where the walker stands and where it wants to be, both from 0 to 99."""

    position: int
    goal: int


class YourEnvironment:
    """`size` states, the same for the same `seed`."""

    def __init__(self, size: int = 512, seed: int = 1) -> None:
        draws = random.Random(seed)
        pairs = (draws.sample(range(100), 2) for _ in range(size))
        self._states = [State(position, goal) for position, goal in pairs]

    def __len__(self) -> int:
        return len(self._states)

    def get_state(self, index: int) -> State:
        return self._states[index]

    def get_action(self, index: int) -> str:
        """The action that leads towards the goal."""
        state = self._states[index]
        return "+" if state.goal > state.position else "-"

    def compute_reward(self, state: State, action: str) -> float:
        """1 for a step towards the goal, 0 for one away from it, -1 for what is no action."""
        if action not in ACTIONS:
            return -1.0
        return float((action == "+") == (state.goal > state.position))
