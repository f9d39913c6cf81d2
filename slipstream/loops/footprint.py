"""What a trainer of a decoder takes, found by training little ones of the same widths.

The bytes of a step are linear in the numbers of layers, words and tokens, in layers times tokens,
and where attention keeps its scores in tokens times the length of their sequences; steps of one and
two layers give the numbers. Logits, whose chunks are not linear in tokens, are reckoned. Called by
`memory_estimate`; knows nothing of runs.

Shapes: L layers, V words, T tokens of a micro-batch, S tokens of each of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slipstream.metrics.allocations import Allocated, AllocationTrace
from slipstream.models.config import ModelConfig
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import TrainBatch, TrainRow

LENGTH = 64
"""Tokens of a sequence of the little steps, and half of those of the longer ones."""

ROWS = 4
"""Sequences of the little steps, and half of those of the larger ones."""

WORDS = 64
"""Of the smaller vocabulary: its logits are few bytes beside all else of a token."""

MOST_TOKENS = 2 * ROWS * LENGTH
"""Of a little step: a forward pass of a trainer has to take them all."""

Trainer = Callable[[TrainBatch], object]
"""One optimizer step on a batch, in one forward pass; returns when it is done."""

MakeTrainer = Callable[[ModelConfig, ComputeThread], Trainer]
"""A trainer of a model of such sizes, made and working on the thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`constant` + `layer` L + `word` V + `token` T + `layer_token` L T + `score` T S +
    `layer_score` L T S."""

    constant: float
    layer: float
    word: float
    token: float
    layer_token: float
    score: float = 0.0
    layer_score: float = 0.0

    def at(self, layers: int, words: int, tokens: int, length: int = 0) -> int:
        """Not below 0."""
        value = self.constant + self.layer * layers + self.word * words
        value += (self.token + self.layer_token * layers) * tokens
        return max(0, round(value + (self.score + self.layer_score * layers) * tokens * length))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBytes:
    """`peak` within a step, from nothing on, without logits; `kept` after it: weights and the
    optimizer's state."""

    peak: Linear
    kept: Linear
    recomputes: bool = False
    """Whether layers are computed again in the backward pass: one layer's activations are then
    there after the logits, and not beside them."""

    def step(self, layers: int, words: int, tokens: int, length: int, *, logits: int) -> int:
        """What a step takes at its peak beyond what is kept, with `logits` bytes of those."""
        peak = self.peak.at(layers, words, tokens, length)
        one_layer = 0
        if self.recomputes:
            one_layer = round((self.peak.token + self.peak.score * length) * tokens)
        return peak + max(0, logits - one_layer) - self.kept.at(layers, words, 0)


def measure_trainer(
    config: ModelConfig,
    make: MakeTrainer,
    *,
    device: torch.device,
    recomputes: bool = False,
) -> TrainerBytes:
    """Of trainers that `make` makes of models like `config`; `recomputes`: with gradient
    checkpointing."""

    def step(
        layers: int = 1, words: int = WORDS, rows: int = ROWS, length: int = LENGTH
    ) -> Allocated:
        little = replace(
            config,
            num_layers=layers,
            vocab_size=words,
            max_position_embeddings=max(config.max_position_embeddings, 2 * LENGTH),
            # Which layers have a window does not change what they take.
            sliding_window=None,
            windowed_layers=(),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return one_step(little, make, device, rows=rows, length=length)

    step()  # what the first step of a process makes is not one trainer's
    base, deeper, wider = step(), step(layers=2), step(words=2 * WORDS)
    more, both = step(rows=2 * ROWS), step(layers=2, rows=2 * ROWS)
    # As many tokens as those of `more`.
    longer, deep_longer = step(length=2 * LENGTH), step(layers=2, length=2 * LENGTH)
    tokens = ROWS * LENGTH
    products = 2 * tokens * LENGTH  # by which T S is larger in the longer ones

    def fit(of: Callable[[Allocated], int]) -> Linear:
        layer_score = (of(deep_longer) - of(both) - of(longer) + of(more)) / products
        score = (of(longer) - of(more)) / products - layer_score
        # Of T tokens by themselves and times their length.
        layer_each = (of(both) - of(deeper) - of(more) + of(base)) / tokens
        each = (of(more) - of(base)) / tokens - layer_each
        layer = of(deeper) - of(base) - layer_each * tokens
        word = (of(wider) - of(base)) / WORDS
        return Linear(
            constant=of(base) - layer - word * WORDS - (each + layer_each) * tokens,
            layer=layer,
            word=word,
            token=each - score * LENGTH,
            layer_token=layer_each - layer_score * LENGTH,
            score=score,
            layer_score=layer_score,
        )

    return TrainerBytes(
        peak=fit(lambda a: a.peak), kept=fit(lambda a: a.kept), recomputes=recomputes
    )


def one_step(
    config: ModelConfig, make: MakeTrainer, device: torch.device, *, rows: int, length: int
) -> Allocated:
    """Of the second step: the first one makes the optimizer's state."""
    compute = ComputeThread("footprint")
    trace = AllocationTrace(device)
    targets = [0.0, *[1.0] * (length - 1)]
    batch = TrainBatch(
        rows=[
            TrainRow(
                tokens=[(place * length + i) % config.vocab_size for i in range(length)],
                loss_mask=targets,
                values=[0.0] * length,
                returns=targets,
            )
            for place in range(rows)
        ]
    )
    try:
        compute.run(trace.start)
        step = make(config, compute)
        for _ in range(2):
            step(batch)
        return compute.run(trace.stop)
    finally:
        compute.close()


def logits_bytes(words: int, tokens: int, *, chunk: int, keep: int) -> int:
    """Of `tokens` predictions: what is kept of them for the backward pass, and two chunks at work
    (`algorithms.log_probs`)."""
    row = 4 * words
    return min(tokens * row, keep) + 2 * min(tokens, chunk) * row
