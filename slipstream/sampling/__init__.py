"""Sampling as a pure function of (key, position, logits): keyed noise, truncation, choice.

Used by the engine, by publish checks and by losses that replay a truncated support. Imports torch
and nothing of ours.
"""

from slipstream.sampling.choose import Choice, choose
from slipstream.sampling.noise import gumbel_noise, key_words
from slipstream.sampling.truncate import truncate

__all__ = ["Choice", "choose", "gumbel_noise", "key_words", "truncate"]
