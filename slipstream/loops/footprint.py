"""What a trainer of a decoder takes, found by training little ones of the same widths.

The bytes of a step are linear in the number of layers, of words and of tokens, and in layers times
tokens; five steps of one and two layers give the five numbers. Logits, whose chunks are not linear
in tokens, are reckoned. Called by `memory_estimate`; knows nothing of runs.

Shapes: L layers, V words, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slipstream.metrics.allocations import Allocated, AllocationTrace
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.single import SingleProcessBackend
from slipstream.types import TrainBatch, TrainRow

ROW_TOKENS = 64
"""Tokens of a sequence of the little steps, where the budget allows it."""

WORDS = 64
"""Of the smaller vocabulary: its logits are few bytes beside all else of a token."""

MakeTrainer = Callable[[Decoder, ComputeThread], SingleProcessBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`constant` + `layer` L + `word` V + `token` T + `layer_token` L T."""

    constant: float
    layer: float
    word: float
    token: float
    layer_token: float

    def at(self, layers: int, words: int, tokens: int) -> int:
        """Not below 0."""
        value = self.constant + self.layer * layers + self.word * words
        return max(0, round(value + (self.token + self.layer_token * layers) * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBytes:
    """`peak` within a step, from nothing on, without logits; `kept` after it: weights and the
    optimizer's state."""

    peak: Linear
    kept: Linear
    recomputes: bool = False
    """Whether layers are computed again in the backward pass: one layer's activations are then
    there after the logits, and not beside them."""

    def step(self, layers: int, words: int, tokens: int, *, logits: int) -> int:
        """What a step takes at its peak beyond what is kept, with `logits` bytes of those."""
        peak = self.peak.at(layers, words, tokens)
        one_layer = round(self.peak.token * tokens) if self.recomputes else 0
        return peak + max(0, logits - one_layer) - self.kept.at(layers, words, 0)


def measure_trainer(
    config: ModelConfig,
    make: MakeTrainer,
    *,
    device: torch.device,
    max_tokens: int | None,
    recomputes: bool = False,
) -> TrainerBytes:
    """Of trainers that `make` makes of decoders like `config`; `max_tokens` is the budget of their
    micro-batches, `recomputes` whether they use gradient checkpointing."""
    length = min(ROW_TOKENS, config.context_limit.tokens)
    rows = 4 if max_tokens is None else max(1, min(4, max_tokens // (2 * length)))

    def step(layers: int, words: int, rows: int) -> Allocated:
        little = replace(
            config,
            num_layers=layers,
            vocab_size=words,
            # Which layers have a window does not change what they take.
            sliding_window=None,
            windowed_layers=(),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return _one_step(little, make, device, rows=rows, length=length)

    step(1, WORDS, rows)  # what the first step of a process makes is not one trainer's
    base = step(1, WORDS, rows)
    deeper, wider = step(2, WORDS, rows), step(1, 2 * WORDS, rows)
    longer, both = step(1, WORDS, 2 * rows), step(2, WORDS, 2 * rows)

    def fit(of: Callable[[Allocated], int]) -> Linear:
        tokens = rows * length
        layer_token = (of(both) - of(deeper) - of(longer) + of(base)) / tokens
        token = (of(longer) - of(base)) / tokens - layer_token
        layer = of(deeper) - of(base) - layer_token * tokens
        word = (of(wider) - of(base)) / WORDS
        constant = of(base) - layer - word * WORDS - (token + layer_token) * tokens
        return Linear(
            constant=constant, layer=layer, word=word, token=token, layer_token=layer_token
        )

    return TrainerBytes(
        peak=fit(lambda a: a.peak), kept=fit(lambda a: a.kept), recomputes=recomputes
    )


def _one_step(
    config: ModelConfig,
    make: MakeTrainer,
    device: torch.device,
    *,
    rows: int,
    length: int,
) -> Allocated:
    """Of the second step: the first one makes the optimizer's state."""
    compute = ComputeThread("footprint")
    trace = AllocationTrace(device)
    batch = TrainBatch(
        rows=[
            TrainRow(
                tokens=[(place * length + i) % config.vocab_size for i in range(length)],
                loss_mask=[0.0, *[1.0] * (length - 1)],
            )
            for place in range(rows)
        ]
    )

    def begin() -> Decoder:
        trace.start()
        decoder = Decoder(config).to(device)
        decoder.init_weights(0)
        return decoder

    try:
        backend = make(compute.run(begin), compute)
        for _ in range(2):
            backend.forward_backward(batch).wait()
            backend.optim_step().wait()
        return compute.run(trace.stop)
    finally:
        compute.close()


def logits_bytes(words: int, tokens: int, *, chunk: int, keep: int) -> int:
    """Of `tokens` predictions: what is kept of them for the backward pass, and two chunks at work
    (`algorithms.log_probs`)."""
    row = 4 * words
    return min(tokens * row, keep) + 2 * min(tokens, chunk) * row
