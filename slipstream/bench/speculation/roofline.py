"""What the machine's own rates allow: the least seconds of a rollout (Williams et al. 2009).

A decode step reads all weights once, and the keys and values of every running request; it
multiplies with all of them for every row. It takes at least as long as the slower of the two does
at the rate that the machine reaches alone. Drafts put several rows where one was: free while memory
is what a step waits for, dear from where multiplying takes longer. Called by `speculation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from slipstream.bench.shapes import matmul_parameters
from slipstream.models.config import ModelConfig

_SIDE = {"cpu": 1536, "cuda": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """`flops` a second in products of large matrices (a multiply-add counts as two), of numbers of
    `itemsize` bytes or of fp32 ones where those are multiplied faster; `bytes` a second out of as
    much memory as a model's weights take (small models are read from caches): medians of a few
    tries with torch's threads. Neighbours on the hardware change both within minutes."""

    flops: float
    bytes: float
    itemsize: int


def measure_rates(dtype: torch.dtype, config: ModelConfig, device: torch.device) -> MachineRates:
    """Takes less than a second."""
    side = _SIDE[device.type]
    a, b = torch.randn(2, side, side, device=device).unbind()
    c, d = a.to(dtype), b.to(dtype)
    long = torch.ones(dtype.itemsize * sum(matmul_parameters(config)) // 4, device=device)
    return MachineRates(
        flops=2 * side**3 / min(_seconds(lambda: a @ b), _seconds(lambda: c @ d)),
        bytes=long.nbytes / _seconds(long.sum),
        itemsize=dtype.itemsize,
    )


def _seconds(call: Callable[[], Tensor]) -> float:
    _until_done(call())
    found = []
    for _ in range(5):
        started = time.perf_counter()
        _until_done(call())
        found.append(time.perf_counter() - started)
    return median(found)


def _until_done(result: Tensor) -> None:
    if result.is_cuda:
        torch.cuda.synchronize(result.device)


def least_seconds(
    config: ModelConfig,
    rates: MachineRates,
    prompts: Sequence[int],
    lengths: Sequence[int],
    drafts: int,
) -> float:
    """Of a rollout that begins all requests at once: prompts and responses of so many tokens, and
    up to `drafts` drafts a step (0: none), always right, free, as many as is best at each step.

    Whoever runs is as far as all others are.
    """
    layers, head = matmul_parameters(config)
    weights = layers + head
    # Of each key-value pair that a row sees: two products of every query head, and what is read.
    pair_flops = 4 * config.num_layers * config.num_heads * config.head_dim
    pair_bytes = 2 * rates.itemsize * config.num_layers * config.num_kv_heads * config.head_dim
    total = 2 * weights * sum(prompts) / rates.flops
    for done in range(max(lengths)):
        seen = [p + done for p, n in zip(prompts, lengths, strict=True) if n > done]
        row_flops = 2 * weights * len(seen) + pair_flops * sum(seen)
        read = (rates.itemsize * weights + pair_bytes * sum(seen)) / rates.bytes
        total += min(
            max(rows * row_flops / rates.flops, read) / rows for rows in range(1, drafts + 2)
        )
    return total
