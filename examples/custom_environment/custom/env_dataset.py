"""A data set that turns the environment's states into prompts."""

from __future__ import annotations

from typing import Any

from your_environment import State, YourEnvironment

from slipstream.compat.verl import RLHFDataset


class CustomEnvDataset(RLHFDataset):
    """Item `idx` is state `idx`. Its fields reach the reward manager under their own names."""

    def __init__(self, your_env: YourEnvironment, **kwargs: Any) -> None:
        self.env = your_env
        # Load your environment data
        super().__init__(**kwargs)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        # Get environment state/action data
        state = self.env.get_state(idx)
        action = self.env.get_action(idx)

        # Format for language model
        prompt = self.state_to_text(state)

        # Tokenize
        tokens = self.tokenizer(prompt, **self.tokenizer_kwargs)

        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "prompt": prompt,
            "state": state,
            "expected_action": action,
        }

    def state_to_text(self, state: State) -> str:
        """Convert environment state to text prompt"""
        return f"{state.position} ->{state.goal} :"
