"""Log-probs of tokens under a large LM head: in chunks of rows, against all logits at once.

Measures forward and backward passes, interleaved: seconds, peak memory above that of the inputs (in
a separate process each), and the largest difference of the gradients. `plain` is autograd through
`F.linear`, `log_softmax` and `gather`. `chunked` is `chunked_token_log_probs` with its defaults.
`kept` also keeps some chunks of logits for the backward pass, as the trainers do. Run it as
`slipstream bench logprob` or `python -m bench.logprob`.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.log_probs import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_KEEP_BYTES,
    chunked_token_log_probs,
)
from slipstream.bench.record import ResultRow, Spread, median_of, this_machine
from slipstream.bench.timing import alternate, ratio
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.metrics.resident import peak_rss, reset_peak_rss, resident_bytes

PLAIN, CHUNKED, KEPT = "plain", "chunked", "kept"

TIME_FLOOR = 1.0
"""Largest allowed time of `kept` over that of `plain`."""

MEMORY_FLOOR = 0.25
"""Largest allowed peak memory of `chunked` and `kept` over that of `plain`."""

GRADIENT_FLOOR = 1e-5
"""Largest allowed difference of gradients, over the largest gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBench:
    """One measurement: `tokens` hidden states of width `hidden`, a vocabulary of `vocab`, float32.

    `kept` keeps `keep_megabytes` MB (10^6 bytes) of logits for its backward pass.
    """

    tokens: int = 8192
    vocab: int = 32_768
    hidden: int = 512
    chunk_size: int = DEFAULT_CHUNK_SIZE
    keep_megabytes: int = DEFAULT_KEEP_BYTES // 10**6
    rounds: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self, "tokens", "vocab", "hidden", "chunk_size", "rounds")
        if self.keep_megabytes < 0:
            raise ConfigError(f"--keep-megabytes {self.keep_megabytes} must be at least 0")


Gradients = tuple[Tensor, Tensor]


class _Inputs:
    """Hidden states, LM head, labels, and the gradients with respect to the log-probs."""

    def __init__(self, bench: LogprobBench) -> None:
        generator = torch.Generator().manual_seed(0)
        self._bench = bench
        self._hidden = torch.randn(bench.tokens, bench.hidden, generator=generator)
        self._weight = torch.randn(bench.vocab, bench.hidden, generator=generator)
        # Logits of unit variance.
        self._weight.mul_(bench.hidden**-0.5)
        self._labels = torch.randint(bench.vocab, (bench.tokens,), generator=generator)
        self._upstream = torch.randn(bench.tokens, generator=generator)
        self._hidden.requires_grad_()
        self._weight.requires_grad_()

    def gradients(self, contender: str) -> Gradients:
        """Gradients of hidden states and head, from a forward and a backward pass."""
        if contender == PLAIN:
            logits = F.linear(self._hidden, self._weight)
            log_p = torch.log_softmax(logits, dim=-1)
            # As at the end of a function: from here only autograd's graph keeps tensors alive.
            del logits
            log_probs = log_p.gather(-1, self._labels.unsqueeze(-1)).squeeze(-1)
            del log_p
        else:
            log_probs, _ = chunked_token_log_probs(
                self._hidden,
                self._weight,
                self._labels,
                chunk_size=self._bench.chunk_size,
                keep_bytes=self._bench.keep_megabytes * 10**6 if contender == KEPT else 0,
            )
        of_hidden, of_weight = torch.autograd.grad(
            log_probs, (self._hidden, self._weight), self._upstream
        )
        return of_hidden, of_weight


def run(bench: LogprobBench) -> list[ResultRow]:
    """Measure; one row per contender."""
    contenders = (PLAIN, CHUNKED, KEPT)
    # First, before this process uses memory itself.
    peaks = {name: _peak_megabytes(bench, name) for name in contenders}
    inputs = _Inputs(bench)
    exact = inputs.gradients(PLAIN)
    apart = {name: _difference(inputs.gradients(name), exact) for name in contenders}
    del exact
    times = alternate({name: _runner(inputs, name) for name in contenders}, rounds=bench.rounds)
    return [
        ResultRow(
            benchmark="logprob",
            case=f"{bench.tokens} tokens, {bench.vocab} words",
            contender=name,
            dtype="float32",
            threads=torch.get_num_threads(),
            seconds=Spread.of(times[name].wall),
            machine=this_machine(),
            values={
                "cpu_seconds": Spread.of(times[name].cpu),
                "times_plain": ratio(times[name].wall, times[PLAIN].wall),
                "peak_megabytes": peaks[name],
                "share_of_plain_memory": peaks[name] / peaks[PLAIN],
                "largest_gradient_difference": apart[name],
            },
            settings={
                "tokens": bench.tokens,
                "vocab": bench.vocab,
                "hidden": bench.hidden,
                "chunk_size": bench.chunk_size,
                "keep_megabytes": bench.keep_megabytes,
                "rounds": bench.rounds,
            },
        )
        for name in contenders
    ]


def missed(rows: Sequence[ResultRow]) -> list[str]:
    """The floors that were missed, in words."""
    values = {row.contender: {k: median_of(v) for k, v in row.values.items()} for row in rows}
    wrong = []
    if values[KEPT]["times_plain"] > TIME_FLOOR:
        wrong.append(f"{KEPT} takes {values[KEPT]['times_plain']:.2f} times as long as {PLAIN}")
    for name in (CHUNKED, KEPT):
        if values[name]["share_of_plain_memory"] > MEMORY_FLOOR:
            share = values[name]["share_of_plain_memory"]
            wrong.append(f"{name} needs {share:.0%} of {PLAIN}'s memory")
        if values[name]["largest_gradient_difference"] > GRADIENT_FLOOR:
            apart = values[name]["largest_gradient_difference"]
            wrong.append(f"{name}'s gradients differ by {apart:.2g}")
    return wrong


def _runner(inputs: _Inputs, contender: str) -> Callable[[], object]:
    return lambda: inputs.gradients(contender)


def _difference(actual: Gradients, exact: Gradients) -> float:
    """The largest difference, over the largest gradient of the same tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, exact, strict=True)
    )


def _peak_megabytes(bench: LogprobBench, contender: str) -> float:
    # A new interpreter, because a forked process would start with its parent's pages.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, bench, contender, torch.get_num_threads()).result()


def _measure(bench: LogprobBench, contender: str, threads: int) -> float:
    """Peak resident memory in MB (10^6 bytes), minus that before the forward pass."""
    torch.set_num_threads(threads)
    # A small pass first, because libraries that are loaded at first use should not count.
    tiny = LogprobBench(tokens=16, vocab=64, hidden=16, keep_megabytes=0)
    _Inputs(tiny).gradients(contender)
    inputs = _Inputs(bench)
    reset_peak_rss()
    before = resident_bytes()
    inputs.gradients(contender)
    return (peak_rss() - before) / 1e6


if __name__ == "__main__":
    from slipstream import cli

    sys.exit(cli.main(["bench", "logprob", *sys.argv[1:]]))
