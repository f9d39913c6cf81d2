"""Training-step speed: model FLOPs per second over those of a large matrix product, interleaved.

FLOPs are counted as in PaLM, appendix B, but with causal attention: 6 per weight and token (forward
and backward of matrix products; the LM head only at target positions), plus attention over half of
the full square. The time of the optimizer counts, its FLOPs do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import TypeVar

import torch

from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.shapes import SHAPES, make_decoder, matmul_parameters
from slipstream.bench.timing import alternate, ratio
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.models.numerics import cpu_has_bf16_units
from slipstream.training import (
    ComputeThread,
    ImmediateTrainFuture,
    OptimSettings,
    SingleProcessBackend,
    TrainFuture,
    sft_loss,
)
from slipstream.training.columns import train_batch
from slipstream.training.optim import OptimizerName
from slipstream.types import TrainBatch, TrainRow

T = TypeVar("T")

FLOOR = 0.25
"""The promised share of the matrix-product rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBench:
    """One measurement: a mini-batch of `rows` sequences of `length` tokens, all of them targets.

    `matmul_size` is the side of the square matrices whose product is the reference.
    """

    shape: str = "quickstart"
    rows: int = 32
    length: int = 128
    optimizer: OptimizerName = "AdamW"
    dtype: torch.dtype = torch.float32
    max_tokens_per_micro_batch: int = 4096
    matmul_size: int = 2048
    rounds: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self, "rows", "length", "matmul_size", "rounds")
        if self.length < 2:
            raise ConfigError("length=1 leaves no token to predict; give at least 2")


def step_flops(bench: TrainBench) -> float:
    """Model FLOPs of one step."""
    c = SHAPES[bench.shape]
    layers, head = matmul_parameters(c)
    tokens, targets = bench.rows * bench.length, bench.rows * (bench.length - 1)
    # Scores and weighted sum, 2 FLOPs each per query, key and channel; t keys at position t.
    pairs = bench.rows * bench.length * (bench.length + 1) / 2
    attention = 4 * pairs * c.num_heads * c.head_dim * c.num_layers
    return 6.0 * (tokens * layers + targets * head) + 3 * attention


def make_batch(bench: TrainBench) -> TrainBatch:
    random = Random(0)
    vocab = SHAPES[bench.shape].vocab_size
    return train_batch(
        [
            TrainRow(
                tokens=[random.randrange(vocab) for _ in range(bench.length)],
                loss_mask=[0.0] + [1.0] * (bench.length - 1),
            )
            for _ in range(bench.rows)
        ]
    )


class _TrainStep:
    """One optimizer step, from forward pass to update. It stores the times of its two parts."""

    def __init__(self, bench: TrainBench, compute: ComputeThread) -> None:
        self.forward_backward: list[float] = []
        self.update: list[float] = []
        self._batch = make_batch(bench)
        self._loss = sft_loss()
        self._backend = SingleProcessBackend(
            make_decoder(bench.shape, max_positions=bench.length),
            optim=OptimSettings(optimizer=bench.optimizer, lr=1e-4),
            dtype=bench.dtype,
            max_tokens_per_micro_batch=bench.max_tokens_per_micro_batch,
            compute=compute,
        )

    def __call__(self) -> None:
        started = time.perf_counter()
        self._backend.forward_backward(self._batch, self._loss).wait()
        between = time.perf_counter()
        self._backend.optim_step().wait()
        self.forward_backward.append(between - started)
        self.update.append(time.perf_counter() - between)


def _matmul(size: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return lambda: a @ b


def _on(compute: ComputeThread, work: Callable[[], object]) -> Callable[[], object]:
    return lambda: compute.run(work)


def run(bench: TrainBench) -> ResultRow:
    """Measure a training step against matrix products of its dtype, and of bf16 if the CPU has
    units for bf16. Without them, one large product would take minutes."""
    compute = ComputeThread()
    try:
        # All on one thread: the OpenMP team of a second thread would slow down the step.
        step = compute.run(lambda: _TrainStep(bench, compute))
        products = {"matmul": _on(compute, _matmul(bench.matmul_size, bench.dtype))}
        if bench.dtype is not torch.bfloat16 and cpu_has_bf16_units():
            bf16 = _matmul(bench.matmul_size, torch.bfloat16)
            products["matmul_bf16"] = _on(compute, bf16)
        times = alternate({"step": step, **products}, rounds=bench.rounds)
    finally:
        compute.close()
    flops, product = step_flops(bench), 2.0 * bench.matmul_size**3
    tokens, seconds = bench.rows * bench.length, times["step"].wall
    values: dict[str, float | Spread] = {
        "cpu_seconds": Spread.of(times["step"].cpu),
        "tokens_per_second": Spread.of([tokens / s for s in seconds]),
        "forward_backward_seconds": Spread.of(step.forward_backward[-bench.rounds :]),
        "optimizer_seconds": Spread.of(step.update[-bench.rounds :]),
        "model_gflops_per_step": flops / 1e9,
        "model_gflops_per_second": Spread.of([flops / s / 1e9 for s in seconds]),
    }
    for name in products:
        values[f"{name}_gflops_per_second"] = Spread.of(
            [product / s / 1e9 for s in times[name].wall]
        )
        # FLOPs per second of the step over those of the product, round by round.
        for suffix, step_times, product_times in (
            ("", seconds, times[name].wall),
            ("_cpu", times["step"].cpu, times[name].cpu),
        ):
            share = ratio(product_times, step_times)
            values[f"share_of_{name}{suffix}"] = share.scaled(flops / product)
    return ResultRow(
        benchmark="train",
        case="step",
        contender="slipstream",
        dtype=str(bench.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        seconds=Spread.of(seconds),
        machine=this_machine(),
        values=values,
        settings={k: v for k, v in asdict(bench).items() if k != "dtype"},
    )


class _Inline(ComputeThread):
    """Runs work immediately on the caller's thread, the only thread that a profiler sees."""

    def submit(self, work: Callable[[], T]) -> TrainFuture[T]:
        return ImmediateTrainFuture(work())


def profile(bench: TrainBench, *, rows: int = 25) -> str:
    """A table of the operations that take the most time in one step, after a warm-up step."""
    step = _TrainStep(bench, _Inline())
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows))
