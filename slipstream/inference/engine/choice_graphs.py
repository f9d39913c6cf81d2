"""Choosing tokens from hidden states, recorded: what `graphs` does for the forward pass.

Noise alone is some sixty small operations. Used by `runner`.

Shapes: M rows, D hidden width.
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
"""From hidden states (M, D), the positions (M,) of what is chosen, and settings, none of which cuts
the law."""


@dataclass(frozen=True, slots=True)
class _ChoiceShape:
    rows: int
    # `SamplingRows.kinds`.
    law: tuple[bool, bool, bool]


class ChoiceGraphs:
    """The recordings for one policy."""

    def __init__(self, record: Recorder, vocab_size: int) -> None:
        self._record, self._most_rows = record, AT_ONCE // vocab_size
        self._seen: Counter[_ChoiceShape] = Counter()
        self._choices: dict[_ChoiceShape, tuple[Inputs, Recorded]] = {}
        self.memory = RecordedMemory("choice graph")
        self.replayed = 0

    def clear(self) -> None:
        """Let go of all recordings, and of the memory that they hold."""
        self._choices.clear()
        self.memory.clear()

    def choose(
        self, choosing: Choosing, hidden_MD: Tensor, positions_M: Tensor, rows: SamplingRows
    ) -> Choice:
        """What `choosing` gives; from a recording it lies in the CPU's memory, where it is wanted
        next. `hidden_MD` may have more rows."""
        M = len(positions_M)
        shape = _ChoiceShape(bucket(M), rows.kinds)
        if rows.any_truncated or shape.rows > self._most_rows:
            return choosing(hidden_MD, positions_M, rows)
        self._seen[shape] += 1
        values = [hidden_MD[:M], positions_M, rows.keys_N2, rows.temperature_N]
        known = self._choices.get(shape)
        if known is not None:
            known[0].fill(values)
            self.memory.stepped()
        elif self._seen[shape] > SEEN:
            known = self._choices[shape] = self._recorded(choosing, values, rows, shape)
            self.memory.add(shape.rows, known[1].nbytes)
        else:
            return choosing(hidden_MD, positions_M, rows)
        recorded = known[1]
        recorded.replay()
        self.replayed += 1
        (packed_3M,) = recorded.results
        tokens, full, law = packed_3M[:, :M].cpu()
        return Choice(tokens.long(), full.float(), law.float())

    def _recorded(
        self, choosing: Choosing, values: list[Tensor], rows: SamplingRows, shape: _ChoiceShape
    ) -> tuple[Inputs, Recorded]:
        inputs = Inputs([(shape.rows, *value.shape[1:]) for value in values], values)
        hidden, positions, keys, temperature = inputs.buffers
        settings = rows.without_truncation(keys, temperature)

        def compute() -> tuple[Tensor, ...]:
            choice = choosing(hidden, positions, settings)
            # All in one: each tensor that is fetched is waited for. None of them is rounded.
            parts = choice.tokens, choice.log_probs, choice.sampling_log_probs
            return (torch.stack([part.double() for part in parts]),)

        return inputs, self._record(compute)
