"""Rollout speed: the embedded engine against a peer, with the same model and batch, interleaved.

    equal   32 responses of equal length: measures the cost of a decode step
    mixed   64 responses of log-normal lengths: also measures the cost of waiting for the longest

A peer that generates batch by batch runs until its longest response ends; only tokens that belong
to a response count. Our engine also returns the log-probs that training needs. The peak memory of
vLLM and llama.cpp is not measured: they compute in processes of their own, and vLLM reserves memory
for its cache at start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist, median

import torch

from slipstream.bench.contenders import (
    OURS,
    PEERS,
    SEPARATE,
    UNSAMPLED,
    Contender,
    Workload,
    contender,
)
from slipstream.bench.memory import peak_megabytes
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.shapes import BenchModel
from slipstream.bench.timing import Times, alternate, ratio
from slipstream.errors import ConfigError, EngineError, check_at_least_one
from slipstream.training.compute_thread import ComputeThread

FLOORS = {"equal": 1.3, "mixed": 2.5}
"""The promised speedup over transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """One measurement.

    `new_tokens` is the length of a response in `equal`, and the median length in `mixed`. The
    lengths in `mixed` are quantiles of a log-normal distribution with standard deviation `sigma` of
    the logarithm: with 64 responses and 0.9, the longest has 8.8 times the median. `temperature` 0
    is greedy. With `folder`, the model is the one in that Hugging Face folder.
    """

    case: str
    batch: int
    new_tokens: int
    shape: str = "quickstart"
    folder: Path | None = None
    peer: str = "hf"
    prompt_length: int = 16
    sigma: float = 0.9
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    rounds: int = 5
    memory: bool = True

    def __post_init__(self) -> None:
        if self.case not in FLOORS:
            raise ConfigError(f"unknown case {self.case!r}; known: {', '.join(FLOORS)}")
        if self.peer not in PEERS:
            raise ConfigError(f"unknown peer {self.peer!r}; known: {', '.join(PEERS)}")
        check_at_least_one(self, "batch", "prompt_length", "new_tokens", "rounds")

    @property
    def model(self) -> BenchModel:
        return BenchModel(shape=self.shape, folder=self.folder)

    @property
    def title(self) -> str:
        """The name of the model in headings and rows."""
        return self.shape if self.folder is None else str(self.folder)

    @property
    def contenders(self) -> tuple[str, ...]:
        """Our engine, and the contenders of the peer that write responses."""
        return (OURS, *(name for name in PEERS[self.peer] if name not in UNSAMPLED))


STANDARD = {
    "equal": RolloutBench(case="equal", batch=32, new_tokens=128),
    "mixed": RolloutBench(case="mixed", batch=64, new_tokens=32),
}
"""The cases with the sizes for which the floors hold."""


def make_workload(bench: RolloutBench) -> Workload:
    """Random prompts, all different, and the lengths of the case in random order. Every call
    returns the same."""
    random = Random(0)
    vocab = bench.model.config.vocab_size
    prompts = [
        tuple(random.randrange(vocab) for _ in range(bench.prompt_length))
        for _ in range(bench.batch)
    ]
    lengths = [bench.new_tokens] * bench.batch
    if bench.case == "mixed":
        normal = NormalDist()
        lengths = [
            max(1, round(n * math.exp(bench.sigma * normal.inv_cdf((i + 0.5) / bench.batch))))
            for i, n in enumerate(lengths)
        ]
        random.shuffle(lengths)
    return Workload(name=bench.case, prompts=tuple(prompts), lengths=tuple(lengths))


def run(bench: RolloutBench) -> list[ResultRow]:
    """Measure; one row per contender, ours first."""
    workload = make_workload(bench)
    outputs: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        compute = ComputeThread()
        stack.callback(compute.close)
        contenders = {
            name: stack.enter_context(
                contender(
                    name,
                    model=bench.model,
                    max_positions=workload.max_positions,
                    dtype=bench.dtype,
                    temperature=bench.temperature,
                    compute=compute,
                )
            )
            for name in bench.contenders
        }
        times = alternate(
            {n: recorded(n, c.generate, outputs, workload) for n, c in contenders.items()},
            rounds=bench.rounds,
            cpu_clocks={name: c.cpu_clock for name, c in contenders.items()},
        )
    return [_row(bench, workload, name, c, times, outputs) for name, c in contenders.items()]


def recorded(
    name: str,
    generate: Callable[[Workload], list[list[int]]],
    outputs: dict[str, list[list[int]]],
    workload: Workload,
) -> Callable[[], None]:
    """A call of `generate(workload)` that stores the responses in `outputs[name]`.

    The call raises EngineError if a response does not have the requested length.
    """

    def run_once() -> None:
        responses = outputs[name] = generate(workload)
        lengths = [len(response) for response in responses]
        if lengths != list(workload.lengths):
            raise EngineError(f"{name} wrote {sum(lengths)} of {workload.useful_tokens} tokens")

    return run_once


def measure_memory(bench: RolloutBench, name: str) -> float:
    """Peak memory in MB of a process in which only `name` generates."""
    return peak_megabytes(
        name,
        make_workload(bench),
        model=bench.model,
        dtype=bench.dtype,
        temperature=bench.temperature,
        threads=torch.get_num_threads(),
    )


def _row(
    bench: RolloutBench,
    workload: Workload,
    name: str,
    measured: Contender,
    times: dict[str, Times],
    outputs: dict[str, list[list[int]]],
) -> ResultRow:
    steps, seconds = max(workload.lengths), times[name].wall
    values: dict[str, float | Spread] = {
        "cpu_seconds": Spread.of(times[name].cpu),
        "tokens_per_second": Spread.of([workload.useful_tokens / s for s in seconds]),
        "ms_per_step": Spread.of([1000 * s / steps for s in seconds]),
        "slipstream_speedup": ratio(seconds, times[OURS].wall),
        "slipstream_speedup_cpu": ratio(times[name].cpu, times[OURS].cpu),
    }
    if bench.temperature == 0:
        values["same_tokens"] = same_tokens(outputs[name], outputs[OURS])
    if bench.memory and name not in SEPARATE:
        values["peak_rss_mb"] = measure_memory(bench, name)
    return ResultRow(
        benchmark="rollout",
        case=bench.case,
        contender=name,
        dtype=measured.dtype,
        threads=measured.threads,
        seconds=Spread.of(seconds),
        machine=this_machine(measured.versions),
        values=values,
        settings={
            **{k: v for k, v in asdict(bench).items() if k not in ("case", "dtype", "folder")},
            "shape": bench.title,
            "useful_tokens": workload.useful_tokens,
            "median_length": median(workload.lengths),
            "longest": steps,
        },
    )


def same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of positions at which two sets of responses of the same lengths agree."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def fastest_peer(rows: Sequence[ResultRow]) -> ResultRow:
    """The row of the fastest peer, by median time."""
    return min((r for r in rows if r.contender != OURS), key=lambda r: r.seconds.median)


def best_speedup(rows: Sequence[ResultRow]) -> Spread:
    """Our speed over the fastest peer's."""
    speedup = fastest_peer(rows).values["slipstream_speedup"]
    assert isinstance(speedup, Spread)
    return speedup
