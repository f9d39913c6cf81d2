"""Prompts and SFT samples: tasks, data sets, samplers, tokenizers, and the data buffer."""
