"""Sampling as a pure function of (key, position, logits): keyed noise, truncation, choice.

The engine, the checks after a weight update, and losses that replay a truncated support use it. It
imports torch and `slipstream.kernels` only.
"""

from slipstream.sampling.choose import Choice, choose
from slipstream.sampling.noise import gumbel_noise, key_words
from slipstream.sampling.truncate import truncate

__all__ = ["Choice", "choose", "gumbel_noise", "key_words", "truncate"]
