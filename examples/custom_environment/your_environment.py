"""A walker on a line: it has a position and a goal, and steps `+` or `-`.

Replace it with your own environment, which defines states and the reward of an action in a state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ACTIONS = ("+", "-")


@dataclass(frozen=True, slots=True)
class State:
    """The walker's position and its goal, both from 0 to 99."""

    position: int
    goal: int


class YourEnvironment:
    """An environment with `size` states; equal seeds give equal states."""

    def __init__(self, size: int = 512, seed: int = 1) -> None:
        draws = random.Random(seed)
        pairs = (draws.sample(range(100), 2) for _ in range(size))
        self._states = [State(position, goal) for position, goal in pairs]

    def __len__(self) -> int:
        return len(self._states)

    def get_state(self, index: int) -> State:
        return self._states[index]

    def get_action(self, index: int) -> str:
        """Return the action that leads towards the goal."""
        state = self._states[index]
        return "+" if state.goal > state.position else "-"

    def compute_reward(self, state: State, action: str) -> float:
        """Return 1 for a step towards the goal, 0 for a step away from it, -1 for other text."""
        if action not in ACTIONS:
            return -1.0
        return float((action == "+") == (state.goal > state.position))
