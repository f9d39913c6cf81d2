"""Rotary frequencies, plain and scaled: the one place where they are computed.

Of their last bit far positions are made, so they are taken as transformers takes them: in fp32, on
the CPU, in its order of operations. Called by `functional`, whose table engine, trainer, kernels
and draft heads share.
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
    """Radians that each pair of numbers of a head is turned by from a position to the next,
    (head_dim / 2,) in fp32, within the context that the model is used in
    (`ModelConfig.context_limit`)."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    wavelengths = theta**exponents
    # Times the reciprocal, as transformers does.
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
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slow, fast = wavelengths > original / low, wavelengths < original / high
    share = (original / wavelengths - low) / (high - low)
    mixed = (1 - share) * plain / factor + share * plain
    return torch.where(slow, plain / factor, torch.where(fast, plain, mixed))


def _yarn(plain: Tensor, wavelengths: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    width = 2 * len(plain)

    def pair_of(turns: float) -> float:
        """Which pair turns so often in the original context, as a real number."""
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
