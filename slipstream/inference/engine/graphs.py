"""Decode steps that are recorded once for each shape and replayed after that: CUDA graphs.

A step is hundreds of small operations, and to start them takes the CPU longer than a GPU needs to
compute them in all but the largest models. A recording starts them all at once. It is fixed to
shapes and addresses, so a step is computed with requests, rows and keys rounded up to a few sizes
(those beyond are padding that nothing looks at), and recordings end with the memory that they were
made for; weights are renewed in place. `graph_shapes` says which there are. Used by `runner`.

Shapes: N requests, W rows of each, P the longest path through a draft tree, F width of states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.inference.engine.graph_shapes import (
    Choices,
    Habits,
    Shape,
    Sizes,
    bucket_of_keys,
    bucket_of_requests,
)
from slipstream.inference.engine.kv_cache import DecodeView, KVStore
from slipstream.inference.engine.recorder import Inputs, Recorded, RecordedMemory, Recorder
from slipstream.inference.engine.verification import Verification
from slipstream.models.decoder import PackedDecoder


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """A recorded step: what goes in, and hidden states (N * W, F), which come out."""

    inputs: Inputs
    recorded: Recorded


class DecodeGraphs:
    """The recordings for one policy and one store."""

    def __init__(
        self, record: Recorder, aux_layers: tuple[int, ...] = (), choices: Choices | None = None
    ) -> None:
        """Hidden states come with the inputs of the layers `aux_layers` beside them. `choices`
        bounds what is recorded to what may come of these draft plans."""
        self._record, self._aux_layers = record, aux_layers
        self._data: Tensor | None = None
        self._steps: dict[Shape, _RecordedStep] = {}
        self._sizes, self._habits = Sizes(choices), Habits()
        self.memory = RecordedMemory("decode graph")
        self.replayed = 0

    @property
    def shapes(self) -> list[Shape]:
        """What is recorded now."""
        return sorted(self._steps)

    def clear(self) -> None:
        """Let go of all recordings, and of the memory that they hold: the store gives its own
        back."""
        if self._data is None:
            return
        self._data = None
        self._steps.clear()
        self.memory.clear()
        self._habits.fade()

    def decode(self, packed: PackedDecoder, store: KVStore, step: Verification) -> Tensor | None:
        """`Runner.decode` of a step that is a matrix by a recording, its hidden states (N * W, F)
        side by side; None where there is none yet. The store has rows in multiples of
        `graph_shapes.ROWS`."""
        if self._data is not store.data:
            self.clear()
            self._data = store.data
        N, W = step.ids_BT.shape
        requests = len(step.starts) - 1
        size = self._sizes.of(W, requests)
        # Rows of padding write to the slots after the others.
        if size is None or step.longest + size - W > store.slots:
            return None
        keys = min(bucket_of_keys(step.longest, packed.dtype, step.ids_BT.device), store.slots)
        shape = Shape(size, bucket_of_requests(N), keys, step.paths is not None)
        self._habits.came(shape, size, shape.requests)
        only = self._sizes.only(size, requests)
        recording = self._steps.get(shape)
        if recording is not None:
            recording.inputs.fill(_values(step, size))
            self.memory.stepped()
        elif self._habits.stays(shape, size, shape.requests, only=only):
            # To record is to compute, and to write keys and values: with this step's tokens.
            recording = self._steps[shape] = self._recorded(packed, store, step, shape)
            self.memory.add(size, recording.recorded.nbytes)
        else:
            self.memory.stepped()
            return None
        recording.recorded.replay()
        self.replayed += 1
        (hidden,) = recording.recorded.results
        # Drafters keep what the next replay writes over.
        return hidden.view(shape.requests, size, -1)[:N, :W].clone().flatten(0, 1)

    def _recorded(
        self, packed: PackedDecoder, store: KVStore, step: Verification, shape: Shape
    ) -> _RecordedStep:
        rows = shape.requests, shape.size
        # A path has at most all rows of its tree after the stem.
        shapes = [rows, rows, *([rows, (*rows, 1 + shape.size)] if shape.on_paths else [])]
        inputs = Inputs(shapes, _values(step, shape.size))
        return _RecordedStep(
            inputs, self._record(self._computation(packed, store, inputs, shape.keys))
        )

    def _computation(
        self, packed: PackedDecoder, store: KVStore, inputs: Inputs, keys: int
    ) -> Callable[[], tuple[Tensor, ...]]:
        ids_NW, slots_NW, *on_paths = inputs.buffers
        places_NW, paths_NWP = on_paths or (slots_NW, None)
        last = packed.config.max_position_embeddings - 1

        def compute() -> tuple[Tensor, ...]:
            view = DecodeView(store, slots_NW, keys, 0, paths_NWP)
            positions_NW = places_NW.clamp(max=last)
            found = packed.forward(ids_NW, positions_NW, kv_cache=view, aux_layers=self._aux_layers)
            return (found.side_by_side().flatten(0, 1),)

        return compute


def _values(step: Verification, size: int) -> list[Tensor]:
    """What goes in: tokens, their slots and, of trees, positions and paths. Requests of padding are
    zeros, in rows of the store that nobody holds; rows of padding have slots of their own, and
    those of trees see the first slot."""
    slots = step.slots_BT
    if size > slots.shape[1]:
        more = torch.arange(1, 1 + size - slots.shape[1], device=slots.device)
        slots = torch.cat([slots, slots[:, -1:] + more], 1)
    values = [step.ids_BT, slots]
    return values if step.paths is None else [*values, step.positions_BT, step.paths]
