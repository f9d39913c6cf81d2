"""Predicts the memory of a decoder's trainer by training small models of the same widths.

The peak of an optimizer step can occur at three points: after the forward pass, when all
activations exist; at the end of the backward pass, when all gradients exist; and inside the
optimizer. The memory at each point is linear in L, V, T and L T. If attention stores its scores, it
is also linear in T S and L T S. Steps of models with one and two layers determine the coefficients.
Each point is predicted separately, because a small step can have its peak at another point than a
large step. The memory of logits is computed, because their chunks are not linear in T.

Layers of more than `MOST_WEIGHTS` weights are not made. The memory is also linear in each width, as
far as it is proportional to weights or activations: a matrix has two different widths. So trainers
of narrower models, two for each wide dimension, determine it. Called by `memory_estimate`. This
module does not know runs or options.

Shapes: L layers, V vocabulary size, T tokens of a micro-batch, S tokens of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from slipstream.metrics.allocations import AllocationTrace
from slipstream.models.config import ModelConfig
from slipstream.training.columns import train_batch
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.losses import LossInputs, LossOutputs, sft_loss
from slipstream.training.protocol import TrainingBackend
from slipstream.types import TrainRow

LENGTH = 64
"""Tokens per sequence in small steps; steps with longer sequences use twice as many."""

ROWS = 4
"""Sequences in small steps; steps with more sequences use twice as many."""

WORDS = 64
"""Size of the smaller vocabulary, so small that its logits need few bytes per token."""

MAX_TOKENS = 2 * ROWS * LENGTH
"""Maximum tokens of a small step. A trainer must process them in one forward pass."""

MOST_WEIGHTS = 1 << 22
"""Weights of a layer of the small models. With gradients and moments, two such layers need 130 MB,
and all steps a few seconds."""

MOST_POSITIONS = 1 << 17
"""Positions of the small models. The process has one table of rotary embeddings for all models,
which `rope_bytes` counts beyond these positions."""

_NARROW = {
    "hidden_size": (64, 128),
    "intermediate_size": (256, 512),
    "num_kv_heads": (2, 4),
    "queries": (2, 4),
    "head_dim": (64, 128),
}
"""Two smaller sizes of each wide dimension. Kernels need no padding for them."""

MakeTrainer = Callable[[ModelConfig, ComputeThread, bool], TrainingBackend]
"""Makes a trainer: arguments are the model's sizes, the thread that the trainer is made and works
on, and whether it uses gradient checkpointing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Coefficients of a number of bytes as a function of the sizes L, V, T and S:

    `constant` + `layer` L + `word` V + `token` T + `layer_token` L T + `score` T S +
    `layer_score` L T S.
    """

    constant: float
    layer: float
    word: float
    token: float
    layer_token: float
    score: float = 0.0
    layer_score: float = 0.0

    def at(self, layers: int, words: int, tokens: int = 0, length: int = 0) -> int:
        """Return the bytes for these sizes, at least 0."""
        value = self.constant + self.layer * layers + self.word * words
        value += (self.token + self.layer_token * layers) * tokens
        return max(0, round(value + (self.score + self.layer_score * layers) * tokens * length))

    def of_one_layer(self, tokens: int, length: int) -> int:
        """Return the bytes that `tokens` tokens of sequences of `length` need in one layer."""
        return max(0, round((self.layer_token + self.layer_score * length) * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBytes:
    """Bytes of a trainer at different points of an optimizer step.

    `kept` counts what stays between steps: weights and the optimizer's state. The other fields
    count memory in addition to `kept`: `forward` after the forward pass, `gradients` after the
    backward pass, and `optimizer` at the peak inside the optimizer, including gradients.
    `accumulated` is what a micro-batch leaves for the next one: the gradients. `layer.of_one_layer`
    returns the activations of one layer without gradient checkpointing.
    """

    kept: Linear
    forward: Linear
    gradients: Linear
    optimizer: Linear
    layer: Linear
    accumulated: Linear

    def step(
        self,
        layers: int,
        words: int,
        tokens: int,
        length: int,
        *,
        logits: int,
        accumulates: bool = False,
    ) -> int:
        """Return the peak bytes of a step in addition to `kept`, if logits need `logits` bytes.

        `accumulates`: the step has several micro-batches, so the gradients of the first exist
        during the forward pass of the others.
        """
        one = self.layer.of_one_layer(tokens, length)
        earlier = self.accumulated.at(layers, words) if accumulates else 0
        return max(
            earlier + self.forward.at(layers, words, tokens, length) + max(logits, one),
            self.gradients.at(layers, words) + one,
            self.optimizer.at(layers, words),
        )

    def sharded(
        self, processes: int, gathered: int, *, recomputes: bool, whole_optimizer: int | None = None
    ) -> TrainerBytes:
        """Return the bytes of each of `processes` that shard weights, gradients and optimizer.

        Each process also holds `gathered` bytes of weights that it has gathered for computing.
        With `recomputes` (gradient checkpointing), a process holds weights in the compute dtype for
        one layer at a time. Without it, all layers' weights stay until the backward pass.
        `whole_optimizer` is for optimizers that are not sharded (Muon). It gives the bytes of all
        weights: these are sharded, and each process has the whole optimizer state and its
        temporary memory.
        """

        def shard(whole: Linear, extra: int = 0) -> Linear:
            part = {
                name: getattr(whole, name) / processes for name in ("constant", "layer", "word")
            }
            return replace(whole, **{**part, "constant": part["constant"] + extra})

        forward = replace(self.forward, constant=self.forward.constant + gathered)
        if recomputes:
            forward = replace(forward, constant=forward.constant + forward.layer, layer=0.0)
        return TrainerBytes(
            kept=shard(self.kept)
            if whole_optimizer is None
            else self._less(round((1 - 1 / processes) * whole_optimizer)),
            forward=forward,
            gradients=shard(self.gradients, gathered),
            accumulated=shard(self.gradients),
            optimizer=shard(self.optimizer) if whole_optimizer is None else self.optimizer,
            layer=self.layer,
        )

    def _less(self, size: int) -> Linear:
        return replace(self.kept, constant=self.kept.constant - size)


def measure_trainer(
    config: ModelConfig,
    make: MakeTrainer,
    *,
    device: torch.device,
    recomputes: bool = False,
    squares: bool = False,
) -> TrainerBytes:
    """Measure trainers that `make` returns, for small models with the widths of `config`.

    If a layer has more than `MOST_WEIGHTS` weights, the widths are smaller, and the result is
    extrapolated. `recomputes` turns on gradient checkpointing. `squares` is for optimizers that
    multiply a matrix by itself (Muon).
    """
    narrow = narrower(config)
    if len(narrow) == 1:
        return _measured(config, make, device, recomputes)
    # The first measurement of a process also counts tables that all later trainers use. These few
    # bytes would be multiplied by the extrapolation.
    _measured(narrow[0][1], make, device, recomputes)
    shares = [(share, _measured(small, make, device, recomputes)) for share, small in narrow]
    parts = {
        part.name: _combined([(share, getattr(found, part.name)) for share, found in shares])
        for part in fields(TrainerBytes)
    }
    if squares:
        # Products of matrices are not linear in each width. Their memory grows like the gradients'
        # if all widths grow in proportion.
        found = _measured(_in_proportion(config), make, device, recomputes)
        ratio = found.optimizer.layer / found.gradients.layer
        gradients = parts["gradients"]
        parts["optimizer"] = replace(gradients, layer=ratio * gradients.layer)
    return TrainerBytes(**parts)


def _combined(shares: Sequence[tuple[float, Linear]]) -> Linear:
    return Linear(
        **{
            part.name: sum(share * getattr(found, part.name) for share, found in shares)
            for part in fields(Linear)
        }
    )


def narrower(config: ModelConfig) -> list[tuple[float, ModelConfig]]:
    """Return models whose memory, multiplied by a factor each and added, is that of `config`.

    It is `config` itself if its layers have at most `MOST_WEIGHTS` weights. Otherwise each wide
    dimension has two smaller values, and there is a model for each combination of them. The factors
    extrapolate a function that is linear in each dimension.
    """
    if config.layer_weights <= MOST_WEIGHTS:
        return [(1.0, config)]
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_kv_heads": config.num_kv_heads,
        # Query heads of each key and value head: the number of heads is a product.
        "queries": config.num_heads // config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    found: list[tuple[float, dict[str, int]]] = [(1.0, {})]
    for name, size in sizes.items():
        low, high = _NARROW[name]
        above = (size - low) / (high - low)
        values = [(1.0, size)] if size <= high else [(1.0 - above, low), (above, high)]
        found = [
            (share * factor, {**chosen, name: value})
            for share, chosen in found
            for factor, value in values
        ]
    return [(share, _with_widths(config, **chosen)) for share, chosen in found]


def _in_proportion(config: ModelConfig) -> ModelConfig:
    """Return a model with small layers whose widths are about in the proportion of `config`'s."""
    head_dim = min(config.head_dim, _NARROW["head_dim"][1])
    heads, kv_heads = (
        count * config.head_dim / head_dim for count in (config.num_heads, config.num_kv_heads)
    )
    small, factor = config, math.sqrt(8 * config.layer_weights / MOST_WEIGHTS)

    def narrow(size: float, multiple: int = 1) -> int:
        return max(1, round(size / factor / multiple)) * multiple

    while small.layer_weights > MOST_WEIGHTS:
        small = _with_widths(
            config,
            hidden_size=narrow(config.hidden_size, 16),
            intermediate_size=narrow(config.intermediate_size, 16),
            num_kv_heads=narrow(kv_heads),
            queries=max(1, narrow(heads) // narrow(kv_heads)),
            head_dim=head_dim,
        )
        # Widths have a minimum, so the first factor may be too small.
        factor *= 2
    return small


def _with_widths(config: ModelConfig, queries: int, **widths: int) -> ModelConfig:
    heads = widths["num_kv_heads"] * queries
    return replace(config, num_heads=heads, **widths)  # type: ignore[arg-type]


def rope_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the table of rotary embeddings that the small models do not make."""
    positions = max(0, config.max_position_embeddings - MOST_POSITIONS)
    return 2 * positions * config.head_dim * dtype.itemsize


def _measured(
    config: ModelConfig, make: MakeTrainer, device: torch.device, recomputes: bool
) -> TrainerBytes:
    def step(
        layers: int = 1,
        words: int = WORDS,
        rows: int = ROWS,
        length: int = LENGTH,
        again: bool = recomputes,
    ) -> StepBytes:
        small = replace(
            config,
            num_layers=layers,
            vocab_size=words,
            max_position_embeddings=max(
                min(config.max_position_embeddings, MOST_POSITIONS), 2 * LENGTH
            ),
            # A layer needs the same memory with a sliding window and without.
            sliding_window=None,
            windowed_layers=(),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return one_step(small, make, device, rows=rows, length=length, recomputes=again)

    step()  # the first step of a process also allocates memory that later trainers reuse

    def six_steps(again: bool) -> list[StepBytes]:
        return [
            step(again=again),
            step(layers=2, again=again),
            step(rows=2 * ROWS, again=again),
            step(layers=2, rows=2 * ROWS, again=again),
            # The same number of tokens as in the steps with more sequences.
            step(length=2 * LENGTH, again=again),
            step(layers=2, length=2 * LENGTH, again=again),
        ]

    steps, wider = six_steps(recomputes), step(words=2 * WORDS)
    without_checkpointing = six_steps(False) if recomputes else steps

    def fit(of: Callable[[StepBytes], int], steps: list[StepBytes] = steps) -> Linear:
        base, deeper, more, both, longer, deep_longer = (of(each) for each in steps)
        tokens = ROWS * LENGTH
        products = 2 * tokens * LENGTH  # the difference of T S between `longer` and `more`
        layer_score = (deep_longer - both - longer + more) / products
        score = (longer - more) / products - layer_score
        # Bytes per token, including scores, in sequences of LENGTH tokens.
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
        layer=fit(lambda m: m.forward, without_checkpointing),
        accumulated=fit(lambda m: m.gradients),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Measured bytes of one step. All fields but `kept` are in addition to `kept`.

    `peak` is the maximum over the whole step.
    """

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
) -> StepBytes:
    """Measure the second step of a new trainer. The first step creates the optimizer's state."""
    compute = ComputeThread("trainer_memory")
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
    base_loss = sft_loss()

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = base_loss(inputs)
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
    return StepBytes(
        kept=kept,
        forward=held["forward"] - kept,
        gradients=held["gradients"] - kept,
        optimizer=most["optimizer"] - kept,
        peak=max(most["forward"], most["gradients"], most["optimizer"]) - kept,
    )


def logits_bytes(words: int, tokens: int, *, chunk: int, keep: int) -> int:
    """Return the bytes of the fp32 logits of `tokens` predictions.

    At most `keep` bytes stay for the backward pass, and two chunks of `chunk` tokens are in use at
    a time (see `algorithms.log_probs`).
    """
    row = 4 * words
    return min(tokens * row, keep) + 2 * min(tokens, chunk) * row
