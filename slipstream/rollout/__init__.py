"""Rollouts: generate and score groups of samples from prompts."""
