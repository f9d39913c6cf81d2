"""Chooses the number of threads on a CPU, by a measurement if there are many cores.

A decode step of a small policy takes less time than waking dozens of threads, so on a large machine
a few threads are faster than all. With up to `FEW` cores, all are used. The choice is stored in the
run folder: a resumed run must use the same number of threads, because it affects the order of sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.checkpoint.files import write_text_atomic
from slipstream.errors import CheckpointError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.reading import reading
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

FEW = 4
"""Up to this number of cores, all are used without a measurement."""

THREADS_FILE = "threads.json"

_AS_GOOD = 1.1
"""More threads than the fastest number are used if their time is within this ratio: training has
larger matrix products, for which more threads are faster."""

ROWS = 32
"""The number of requests in a measured step."""

_TOKENS, _ROUNDS = 12, 3
_VOCABULARY = 1024


def candidates(cores: int) -> list[int]:
    """Powers of two up to `cores`, and `cores`."""
    return sorted({*(1 << n for n in range(cores.bit_length()) if 1 << n <= cores), cores})


def choose(seconds: Mapping[int, float]) -> int:
    """The largest number of threads that is about as fast as the fastest."""
    best = min(seconds.values())
    return max(threads for threads, took in seconds.items() if took <= _AS_GOOD * best)


def threads_for(
    folder: Path,
    policy: ModelConfig,
    *,
    dtype: torch.dtype,
    cores: int,
    notify: Callable[[str], None],
) -> int:
    """The number of threads for the run in `folder`: the number it started with, or the fastest for
    decode steps on layers like those of `policy`.

    Call it on the compute thread: the measurement starts an OpenMP team on the calling thread.
    """
    file = folder / THREADS_FILE
    if file.exists():
        with reading(file, CheckpointError, "remove it, or set trainer.num_threads"):
            known = int(json.loads(file.read_text())["num_threads"])
        if 1 <= known <= cores:
            return known
    before = torch.get_num_threads()
    engine = _small_engine(policy, dtype)
    measured: dict[int, float] = {}
    try:
        for threads in candidates(cores):
            torch.set_num_threads(threads)
            measured[threads] = _step_seconds(engine)
    finally:
        torch.set_num_threads(before)
    chosen = choose(measured)
    times = {threads: round(1000 * took, 3) for threads, took in measured.items()}
    write_text_atomic(file, json.dumps({"num_threads": chosen, "ms_per_step": times}) + "\n")
    shown = ", ".join(f"{threads}: {took:.2f}" for threads, took in times.items())
    notify(
        f"{chosen} threads on {cores} cores: a decode step of {ROWS} requests in one layer takes "
        f"(threads: ms) {shown}; trainer.num_threads={chosen} sets it for other runs, too"
    )
    return chosen


def _small_engine(policy: ModelConfig, dtype: torch.dtype) -> Engine:
    vocab_size = min(policy.vocab_size, _VOCABULARY)
    decoder = Decoder(replace(policy, num_layers=1, vocab_size=vocab_size, eos_token_id=None))
    decoder.init_weights(0)
    return Engine(decoder, EngineSettings(max_model_len=4 * _TOKENS, dtype=dtype))


def _step_seconds(engine: Engine) -> float:
    """The minimum time of a decode step over some rounds, after a warm-up round."""
    took = []
    for number in range(_ROUNDS + 1):
        requests = [
            GenerateRequest(
                request_id=f"{number}-{row}",
                prompt_ids=(1 + row % 8, 1, 2),
                params=SamplingParams(max_tokens=_TOKENS, ignore_eos=True),
                key=NoiseKey(seed=number, uid=str(row)),
            )
            for row in range(ROWS)
        ]
        start = time.perf_counter()
        engine.run(requests)
        took.append((time.perf_counter() - start) / _TOKENS)
    return min(took[1:])
