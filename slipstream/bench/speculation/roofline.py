"""The least time of a rollout by the machine's own rates: a roofline model (Williams et al. 2009).

A decode step reads all weights once, and the keys and values of every running request. It
multiplies with all of them for each token of the forward pass. A step takes at least the longer of
these two times, at the rates that the machine reaches for each alone. Drafts add tokens to the
forward pass. They cost nothing while memory limits the step, and time when multiplication limits
it. Used by `rollout`, and by `bench.decode` for the rate of reading.
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
    """Rates of the machine, as medians of a few tries with torch's threads.

    `flops`: FLOPs per second in products of large matrices (a multiply-add counts as two), in
    numbers of `itemsize` bytes, or in fp32 if that is faster. `bytes`: bytes per second read from
    memory of the size of the model's weights, because small models are read from caches. Other load
    on the machine changes both within minutes.
    """

    flops: float
    bytes: float
    itemsize: int


def measure_rates(dtype: torch.dtype, config: ModelConfig, device: torch.device) -> MachineRates:
    """Measure the rates, within a second."""
    side = _SIDE[device.type]
    a, b = torch.randn(2, side, side, device=device).unbind()
    c, d = a.to(dtype), b.to(dtype)
    long = as_many_bytes(dtype, config, device)
    return MachineRates(
        flops=2 * side**3 / min(_seconds(lambda: a @ b), _seconds(lambda: c @ d)),
        bytes=long.nbytes / _seconds(long.sum),
        itemsize=dtype.itemsize,
    )


def as_many_bytes(dtype: torch.dtype, config: ModelConfig, device: torch.device) -> Tensor:
    """An fp32 tensor with as many bytes as the weights that a decode step reads. Its sum reads
    them."""
    return torch.ones(dtype.itemsize * sum(matmul_parameters(config)) // 4, device=device)


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
    """The least seconds of a rollout that starts all requests at once.

    `prompts` and `lengths` are tokens per prompt and per response. Each step has up to `drafts`
    draft tokens per request (0: none), all accepted and at no cost; their number is the best for
    that step. All running requests are at the same token.
    """
    layers, head = matmul_parameters(config)
    weights = layers + head
    # Per key-value pair in the context: the FLOPs of two products per query head, and bytes read.
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
