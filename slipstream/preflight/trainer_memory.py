"""What a trainer of a decoder takes, found by training little ones of the same widths.

Three moments of a step may be its largest: after the forward pass, when all activations are there;
at the end of the backward pass, when all gradients are; and within the optimizer. What is there at
each is linear in the numbers of layers, words and tokens, in layers times tokens, and where
attention keeps its scores in tokens times the length of their sequences; steps of one and two
layers give the numbers. Which moment is the largest changes with all of them, so the largest of a
little step would say nothing. Logits, whose chunks are not linear in tokens, are reckoned. Called
by `memory_estimate`; knows nothing of runs.

Shapes: L layers, V words, T tokens of a micro-batch, S tokens of each of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slipstream.metrics.allocations import AllocationTrace
from slipstream.models.config import ModelConfig
from slipstream.training.columns import train_batch
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.losses import LossInputs, LossOutputs, sft_loss
from slipstream.training.protocol import TrainingBackend
from slipstream.types import TrainRow

LENGTH = 64
"""Tokens of a sequence of the little steps, and half of those of the longer ones."""

ROWS = 4
"""Sequences of the little steps, and half of those of the larger ones."""

WORDS = 64
"""Of the smaller vocabulary: its logits are few bytes beside all else of a token."""

MOST_TOKENS = 2 * ROWS * LENGTH
"""Of a little step: a forward pass of a trainer has to take them all."""

MakeTrainer = Callable[[ModelConfig, ComputeThread, bool], TrainingBackend]
"""A trainer of a model of such sizes, made and working on the thread, with gradient checkpointing
or without."""


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

    def at(self, layers: int, words: int, tokens: int = 0, length: int = 0) -> int:
        """Not below 0."""
        value = self.constant + self.layer * layers + self.word * words
        value += (self.token + self.layer_token * layers) * tokens
        return max(0, round(value + (self.score + self.layer_score * layers) * tokens * length))

    def of_one_layer(self, tokens: int, length: int) -> int:
        """What `tokens` take of one layer."""
        return max(0, round((self.layer_token + self.layer_score * length) * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBytes:
    """What a trainer keeps from step to step (weights, the optimizer's state), and beyond that:
    `forward`, all that a forward pass leaves; `gradients`; `optimizer`, the most within it, with
    the gradients; `layer`, of which `of_one_layer` is what one layer leaves where nothing is
    computed again."""

    kept: Linear
    forward: Linear
    gradients: Linear
    optimizer: Linear
    layer: Linear

    def step(self, layers: int, words: int, tokens: int, length: int, *, logits: int) -> int:
        """What a step takes at its peak beyond what is kept, with `logits` bytes of those."""
        one = self.layer.of_one_layer(tokens, length)
        return max(
            self.forward.at(layers, words, tokens, length) + max(logits, one),
            self.gradients.at(layers, words) + one,
            self.optimizer.at(layers, words),
        )

    def spread(
        self, processes: int, gathered: int, *, recomputes: bool, whole_optimizer: int | None = None
    ) -> TrainerBytes:
        """Of each of so many processes that share weights, gradients and optimizer state: slices of
        these, and `gathered` bytes of the weights that are there at once. `recomputes`: weights in
        compute form are there for a layer at a time, and not, with the activations, until the
        backward pass. `whole_optimizer`: the bytes of the weights, where they alone are shared, and
        each process has the optimizer's state and what it works on as one would."""

        def slices(whole: Linear, extra: int = 0) -> Linear:
            part = {
                name: getattr(whole, name) / processes for name in ("constant", "layer", "word")
            }
            return replace(whole, **{**part, "constant": part["constant"] + extra})

        forward = replace(self.forward, constant=self.forward.constant + gathered)
        if recomputes:
            forward = replace(forward, constant=forward.constant + forward.layer, layer=0.0)
        return TrainerBytes(
            kept=slices(self.kept)
            if whole_optimizer is None
            else self._less(round((1 - 1 / processes) * whole_optimizer)),
            forward=forward,
            gradients=slices(self.gradients, gathered),
            optimizer=slices(self.optimizer) if whole_optimizer is None else self.optimizer,
            layer=self.layer,
        )

    def _less(self, size: int) -> Linear:
        return replace(self.kept, constant=self.kept.constant - size)


def measure_trainer(
    config: ModelConfig, make: MakeTrainer, *, device: torch.device, recomputes: bool = False
) -> TrainerBytes:
    """Of trainers that `make` makes of models like `config`; `recomputes`: with gradient
    checkpointing."""

    def step(
        layers: int = 1,
        words: int = WORDS,
        rows: int = ROWS,
        length: int = LENGTH,
        again: bool = recomputes,
    ) -> Moments:
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
        return one_step(little, make, device, rows=rows, length=length, recomputes=again)

    step()  # what the first step of a process makes is not one trainer's

    def six(again: bool) -> list[Moments]:
        return [
            step(again=again),
            step(layers=2, again=again),
            step(rows=2 * ROWS, again=again),
            step(layers=2, rows=2 * ROWS, again=again),
            # As many tokens as in those of more sequences.
            step(length=2 * LENGTH, again=again),
            step(layers=2, length=2 * LENGTH, again=again),
        ]

    steps, wider = six(recomputes), step(words=2 * WORDS)
    whole = six(False) if recomputes else steps

    def fit(of: Callable[[Moments], int], steps: list[Moments] = steps) -> Linear:
        base, deeper, more, both, longer, deep_longer = (of(each) for each in steps)
        tokens = ROWS * LENGTH
        products = 2 * tokens * LENGTH  # by which T S is larger in the longer ones
        layer_score = (deep_longer - both - longer + more) / products
        score = (longer - more) / products - layer_score
        # Of T tokens by themselves and times their length.
        layer_each = (both - deeper - more + base) / tokens
        each = (more - base) / tokens - layer_each
        layer = deeper - base - layer_each * tokens
        word = (of(wider) - of(steps[0])) / WORDS
        return Linear(
            constant=base - layer - word * WORDS - (each + layer_each) * tokens,
            layer=layer,
            word=word,
            token=each - score * LENGTH,
            layer_token=layer_each - layer_score * LENGTH,
            score=score,
            layer_score=layer_score,
        )

    return TrainerBytes(
        kept=fit(lambda m: m.kept),
        forward=fit(lambda m: m.forward),
        gradients=fit(lambda m: m.gradients),
        optimizer=fit(lambda m: m.optimizer),
        layer=fit(lambda m: m.forward, whole),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of one step, in bytes; all but `kept` beyond what is kept. `peak`: the most of all."""

    kept: int
    forward: int
    gradients: int
    optimizer: int
    peak: int


def one_step(
    config: ModelConfig,
    make: MakeTrainer,
    device: torch.device,
    *,
    rows: int,
    length: int,
    recomputes: bool = False,
) -> Moments:
    """Of the second step: the first one makes the optimizer's state."""
    compute = ComputeThread("footprint")
    trace = AllocationTrace(device)
    batch = train_batch(
        [
            TrainRow(
                tokens=[(place * length + i) % config.vocab_size for i in range(length)],
                loss_mask=[0.0, *[1.0] * (length - 1)],
            )
            for place in range(rows)
        ]
    )
    usual = sft_loss()

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = usual(inputs)
        trace.mark("forward")
        return outputs

    try:
        compute.run(trace.start)
        backend = make(config, compute, recomputes)
        for _ in range(2):
            compute.run(lambda: trace.mark("kept"))
            backend.forward_backward(batch, loss).wait()
            compute.run(lambda: trace.mark("gradients"))
            backend.optim_step().wait()
            compute.run(lambda: trace.mark("optimizer"))
        held, most = compute.run(trace.stop)
    finally:
        compute.close()
    kept = held["kept"]
    return Moments(
        kept=kept,
        forward=held["forward"] - kept,
        gradients=held["gradients"] - kept,
        optimizer=most["optimizer"] - kept,
        peak=max(most["forward"], most["gradients"], most["optimizer"]) - kept,
    )


def logits_bytes(words: int, tokens: int, *, chunk: int, keep: int) -> int:
    """Of `tokens` predictions: what is kept of them for the backward pass, and two chunks at work
    (`algorithms.log_probs`)."""
    row = 4 * words
    return min(tokens * row, keep) + 2 * min(tokens, chunk) * row
