"""Log-probs of tokens under a large LM head: by chunks of rows against through all logits.

Forward and backward pass, in turns: seconds, peak memory above what the inputs take, each in a
process of its own, and the largest difference of the gradients. `plain` is what autograd makes of
`F.linear`, `log_softmax` and `gather`; `chunked` is `chunked_token_log_probs` as it is by default,
`kept` the same with some chunks of logits kept for its backward pass, as trainers have it.
"""

from __future__ import annotations

import multiprocessing
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
from slipstream.metrics.resident import forget_peak, peak_rss, resident_bytes

PLAIN, CHUNKED, KEPT = "plain", "chunked", "kept"

TIME_FLOOR = 1.0
"""Seconds of `kept` over those of `plain`, at most."""

MEMORY_FLOOR = 0.25
"""Peak memory of chunks over that of `plain`, at most."""

GRADIENT_FLOOR = 1e-5
"""Largest difference of gradients over the largest gradient, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBench:
    """One measurement: `tokens` rows of `hidden` numbers, a head of `vocab` words, in float32.

    `keep_megabytes` (of 10^6 bytes) of logits stay for the backward pass of `kept`.
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
            raise ConfigError(f"--keep-megabytes {self.keep_megabytes}: give at least 0")


Gradients = tuple[Tensor, Tensor]


class _Inputs:
    """Hidden states, head, labels, and the gradients that arrive at the log-probs."""

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
        """Of hidden states and head, after a forward and a backward pass."""
        if contender == PLAIN:
            logits = F.linear(self._hidden, self._weight)
            log_p = torch.log_softmax(logits, dim=-1)
            # As in a function: the graph alone holds on to what it needs.
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
    # First: a process that starts later would find this one's memory in use.
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
    """What is not as promised, in words."""
    values = {row.contender: {k: median_of(v) for k, v in row.values.items()} for row in rows}
    wrong = []
    if values[KEPT]["times_plain"] > TIME_FLOOR:
        wrong.append(f"{KEPT} takes {values[KEPT]['times_plain']:.2f} times as long as {PLAIN}")
    for name in (CHUNKED, KEPT):
        if values[name]["share_of_plain_memory"] > MEMORY_FLOOR:
            share = values[name]["share_of_plain_memory"]
            wrong.append(f"{name} takes {share:.0%} of {PLAIN}'s memory")
        if values[name]["largest_gradient_difference"] > GRADIENT_FLOOR:
            apart = values[name]["largest_gradient_difference"]
            wrong.append(f"{name}'s gradients are {apart:.2g} off")
    return wrong


def _runner(inputs: _Inputs, contender: str) -> Callable[[], object]:
    return lambda: inputs.gradients(contender)


def _difference(actual: Gradients, exact: Gradients) -> float:
    """The largest one, over the largest gradient of the same tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, exact, strict=True)
    )


def _peak_megabytes(bench: LogprobBench, contender: str) -> float:
    # A fresh interpreter: a forked one would start with its parent's pages.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, bench, contender, torch.get_num_threads()).result()


def _measure(bench: LogprobBench, contender: str, threads: int) -> float:
    """Peak resident MB (10^6 bytes) above what is resident before the forward pass."""
    torch.set_num_threads(threads)
    # A small one first: libraries that are loaded at their first use are not what is measured.
    tiny = LogprobBench(tokens=16, vocab=64, hidden=16, keep_megabytes=0)
    _Inputs(tiny).gradients(contender)
    inputs = _Inputs(bench)
    forget_peak()
    before = resident_bytes()
    inputs.gradients(contender)
    return (peak_rss() - before) / 1e6
