"""Peak memory of one contender, in a process of its own: nobody else's memory is counted.

Called by `rollout` and `logprob`.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from slipstream.bench.contenders import Workload, contender
from slipstream.training.compute_thread import ComputeThread

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_megabytes(
    name: str,
    workload: Workload,
    *,
    shape: str,
    dtype: torch.dtype,
    temperature: float,
    threads: int,
) -> float:
    """Largest resident memory in MB (10^6 bytes) of a process that generates `workload` once."""
    # A fresh interpreter: a forked one would start with its parent's pages.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, name, workload, shape, dtype, temperature, threads).result()


def _measure(
    name: str,
    workload: Workload,
    shape: str,
    dtype: torch.dtype,
    temperature: float,
    threads: int,
) -> float:
    torch.set_num_threads(threads)
    compute = ComputeThread()
    with contender(
        name,
        shape=shape,
        max_positions=workload.max_positions,
        dtype=dtype,
        temperature=temperature,
        compute=compute,
    ) as ready:
        # Loading the model left one.
        forget_peak()
        ready.generate(workload)
    compute.close()
    return peak_rss() / 1e6


def forget_peak() -> None:
    """`peak_rss` begins anew (Linux; elsewhere it cannot)."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Resident bytes of this process now (Linux)."""
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
