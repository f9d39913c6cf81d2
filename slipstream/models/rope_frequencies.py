"""Compute rotary frequencies, plain and scaled. All callers share this module.

An error in the last bit of a frequency grows with the position. So the frequencies are computed as
in transformers: in fp32, on the CPU, in the same order of operations. `functional` calls this
module and builds the table that engine, trainer, kernels and draft heads share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Tensor:
    """Return the rotation in radians per position of each pair of a head: (head_dim / 2,) fp32.

    The values hold for sequences within `ModelConfig.context_limit`.
    """
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    wavelengths = theta**exponents
    # A reciprocal, as in transformers: a negative power would differ in the last bit.
    plain = 1.0 / wavelengths
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(plain, wavelengths, theta, scaling)
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(scaling.short_factor) * wavelengths)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return the frequencies of Llama 3.1: interpolated by wavelength between two limits."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slow, fast = wavelengths > original / low, wavelengths < original / high
    share = (original / wavelengths - low) / (high - low)
    mixed = (1 - share) * plain / factor + share * plain
    return torch.where(slow, plain / factor, torch.where(fast, plain, mixed))


def _yarn(plain: Tensor, wavelengths: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023), with a linear ramp between two pairs."""
    width = 2 * len(plain)

    def pair_of(turns: float) -> float:
        """Return the (fractional) index of the pair with `turns` turns in the original context."""
        original = scaling.original_max_position_embeddings
        return (width * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(len(plain), dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + plain * kept
