"""Peak memory of one contender, measured in a separate process that does nothing else.

Used by `rollout`.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from slipstream.bench.contenders import Workload, contender
from slipstream.bench.shapes import BenchModel
from slipstream.metrics.resident import peak_rss, reset_peak_rss
from slipstream.training.compute_thread import ComputeThread


def peak_megabytes(
    name: str,
    workload: Workload,
    *,
    model: BenchModel,
    dtype: torch.dtype,
    temperature: float,
    threads: int,
) -> float:
    """Largest resident memory in MB (10^6 bytes) of a process that generates `workload` once."""
    # A new interpreter, because a forked process would start with its parent's pages.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, name, workload, model, dtype, temperature, threads).result()


def _measure(
    name: str,
    workload: Workload,
    model: BenchModel,
    dtype: torch.dtype,
    temperature: float,
    threads: int,
) -> float:
    torch.set_num_threads(threads)
    compute = ComputeThread()
    with contender(
        name,
        model=model,
        max_positions=workload.max_positions,
        dtype=dtype,
        temperature=temperature,
        compute=compute,
    ) as ready:
        # Loading the model can need more memory than generating.
        reset_peak_rss()
        ready.generate(workload)
    compute.close()
    return peak_rss() / 1e6
