"""Slipstream: RL post-training of reasoning language models whose rollouts speed themselves up."""

__version__ = "0.1.0"
