"""How many threads compute on a CPU: no more than this process may use and, where these are many,
what a measurement at the start of a run says.

A decode step of a small policy is over before dozens of threads have woken, so on a large machine
all cores are slower than a few. Two to four are few enough to take them all. What was measured lies
in the run folder: a run that is resumed computes with as many threads again, for sums are taken in
another order with another number of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.checkpoint.files import write_text_atomic
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

FEW = 4
"""Cores that are all used without a measurement."""

THREADS_FILE = "threads.json"

_AS_GOOD = 1.1
"""More threads than the fastest are taken up to this ratio of times: training has larger products,
for which they are faster."""

ROWS = 32
"""Requests of a measured step."""

_TOKENS, _ROUNDS = 12, 3
_VOCABULARY = 1024


def candidates(cores: int) -> list[int]:
    """Powers of two up to `cores`, and all of them."""
    return sorted({*(1 << n for n in range(cores.bit_length()) if 1 << n <= cores), cores})


def choose(seconds: Mapping[int, float]) -> int:
    """The most threads that are about as fast as the fastest."""
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
    """Threads for a run in `folder`: those that it began with, or those in which decode steps are
    fastest on layers like those of `policy`.

    For the thread that will compute: the measurement leaves a team of OpenMP threads behind.
    """
    file = folder / THREADS_FILE
    if file.exists():
        known = json.loads(file.read_text())["num_threads"]
        if known <= cores:
            return int(known)
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
        f"(threads: ms) {shown}; trainer.num_threads={chosen} keeps it so in other runs"
    )
    return chosen


def _small_engine(policy: ModelConfig, dtype: torch.dtype) -> Engine:
    vocab_size = min(policy.vocab_size, _VOCABULARY)
    decoder = Decoder(replace(policy, num_layers=1, vocab_size=vocab_size, eos_token_id=None))
    decoder.init_weights(0)
    return Engine(decoder, EngineSettings(max_model_len=4 * _TOKENS, dtype=dtype))


def _step_seconds(engine: Engine) -> float:
    """The least of some rounds, after one to warm up."""
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
