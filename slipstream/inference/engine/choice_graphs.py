"""CUDA graphs of token sampling: from hidden states to sampled tokens and their log-probs.

Keyed noise alone takes about 60 small operations, so launching them one by one is slow. `graphs`
records the forward pass in the same way. Used by `runner`.

Shapes: M rows, one per token to sample; D hidden width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.inference.engine.graph_shapes import SEEN, bucket
from slipstream.inference.engine.recorder import Inputs, Recorded, RecordedMemory, Recorder
from slipstream.sampling.choose import Choice, SamplingRows
from slipstream.sampling.noise import AT_ONCE

Choosing = Callable[[Tensor, Tensor, SamplingRows], Choice]
"""Samples tokens from hidden states (M, D), their positions (M,) and sampling settings without
truncation (top-k, top-p, min-p)."""


@dataclass(frozen=True, slots=True)
class _ChoiceShape:
    """The shape of recorded token sampling."""

    rows: int
    kinds: tuple[bool, bool, bool]
    """`SamplingRows.kinds`, which determine the operations."""


class ChoiceGraphs:
    """The recordings of token sampling for one policy. `replayed` counts replays."""

    def __init__(self, record: Recorder, vocab_size: int) -> None:
        self._record, self._max_rows = record, AT_ONCE // vocab_size
        self._seen: Counter[_ChoiceShape] = Counter()
        self._choices: dict[_ChoiceShape, tuple[Inputs, Recorded]] = {}
        self.memory = RecordedMemory("choice graph", ("row", "rows"))
        self.replayed = 0

    def clear(self) -> None:
        """Delete all recordings and free their memory."""
        self._choices.clear()
        self.memory.clear()

    def choose(
        self, choosing: Choosing, hidden_MD: Tensor, positions_M: Tensor, rows: SamplingRows
    ) -> Choice:
        """Sample tokens as `choosing` does, from a recording if there is one.

        Results of a recording are on the CPU, where the engine needs them. `hidden_MD` may have
        more rows than there are positions. Settings with truncation and large batches are never
        recorded.
        """
        M = len(positions_M)
        shape = _ChoiceShape(bucket(M), rows.kinds)
        if rows.any_truncated or shape.rows > self._max_rows:
            return choosing(hidden_MD, positions_M, rows)
        self._seen[shape] += 1
        values = [hidden_MD[:M], positions_M, rows.keys_N2, rows.temperature_N]
        recording = self._choices.get(shape)
        if recording is not None:
            recording[0].fill(values)
            self.memory.stepped()
        elif self._seen[shape] > SEEN:
            recording = self._choices[shape] = self._recorded(choosing, values, rows, shape)
            self.memory.add(shape.rows, recording[1].nbytes)
        else:
            return choosing(hidden_MD, positions_M, rows)
        recorded = recording[1]
        recorded.replay()
        self.replayed += 1
        (packed_3M,) = recorded.results
        tokens, log_probs, sampling_log_probs = packed_3M[:, :M].cpu()
        return Choice(tokens.long(), log_probs.float(), sampling_log_probs.float())

    def _recorded(
        self, choosing: Choosing, values: list[Tensor], rows: SamplingRows, shape: _ChoiceShape
    ) -> tuple[Inputs, Recorded]:
        inputs = Inputs([(shape.rows, *value.shape[1:]) for value in values], values)
        hidden, positions, keys, temperature = inputs.buffers
        settings = rows.without_truncation(keys, temperature)

        def compute() -> tuple[Tensor, ...]:
            choice = choosing(hidden, positions, settings)
            # One tensor, because each copy to the CPU synchronizes. float64 holds all values
            # exactly.
            parts = choice.tokens, choice.log_probs, choice.sampling_log_probs
            return (torch.stack([part.double() for part in parts]),)

        return inputs, self._record(compute)
