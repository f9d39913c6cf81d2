"""A reward manager that asks the environment for the reward of each response."""

from __future__ import annotations

from typing import Any

import torch
from your_environment import YourEnvironment

from slipstream.compat.verl import DataProto
from slipstream.data.tokenizer import build_tokenizer


class CustomRewardManager:
    """Read the action in each response and ask the environment for its reward."""

    def __init__(self, environment: YourEnvironment, **kwargs: Any) -> None:
        self.env = environment
        self.tokenizer = build_tokenizer()

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Compute custom rewards"""
        rewards = []

        for i in range(len(data.batch)):
            # Get model response
            response = data.batch["responses"][i]

            # Extract action from response
            action = self.extract_action(response)

            # Get environment state
            state = data.batch["state"][i]

            # Compute reward in environment
            reward = self.env.compute_reward(state, action)
            rewards.append(reward)

        return torch.tensor(rewards, dtype=torch.float32)

    def extract_action(self, response: torch.Tensor) -> str:
        """Extract action from model text response"""
        words = self.tokenizer.decode(response).split()
        return words[0] if words else ""
