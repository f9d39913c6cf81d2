"""CUDA graphs of decode steps: each shape is recorded once and then replayed.

A step has hundreds of small operations. In all but the largest models, the CPU needs longer to
launch them than the GPU to compute them. A recording launches all of them with one call. It has
fixed shapes and addresses. So requests, rows and keys are padded to a few sizes, recordings are
deleted when the KV store gets new memory, and new weights are copied in place. `graph_shapes`
decides which shapes are recorded. Used by `runner`.

Shapes: N requests, W rows (tokens) per request, P longest path of a draft tree, F width of
auxiliary and final states.
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
    """A recorded decode step: its input buffers, and the recording, whose result are hidden states
    (N * W, F)."""

    inputs: Inputs
    recorded: Recorded


class DecodeGraphs:
    """The recorded decode steps of one policy and one KV store. `replayed` counts replays."""

    def __init__(
        self, record: Recorder, aux_layers: tuple[int, ...] = (), choices: Choices | None = None
    ) -> None:
        """`aux_layers` are layers whose inputs are returned with the final states. `choices` lists
        the draft plans that may occur; only their shapes are recorded."""
        self._record, self._aux_layers = record, aux_layers
        self._data: Tensor | None = None
        self._steps: dict[Shape, _RecordedStep] = {}
        self._sizes, self._habits = Sizes(choices), Habits()
        self.memory = RecordedMemory("decode graph")
        self.replayed = 0

    @property
    def shapes(self) -> list[Shape]:
        """The shapes that are recorded now."""
        return sorted(self._steps)

    def clear(self) -> None:
        """Delete all recordings and free their memory. Called before the store frees its memory."""
        if self._data is None:
            return
        self._data = None
        self._steps.clear()
        self.memory.clear()
        self._habits.fade()

    def decode(self, packed: PackedDecoder, store: KVStore, step: Verification) -> Tensor | None:
        """Run a decode step with equal numbers of rows per request by a recording.

        Returns auxiliary and final states, concatenated (N * W, F). Returns None if the shape is
        not recorded yet; the caller then runs the step itself. The store must have rows in
        multiples of `graph_shapes.ROWS`.
        """
        if self._data is not store.data:
            self.clear()
            self._data = store.data
        N, W = step.ids_BT.shape
        requests = len(step.starts) - 1
        size = self._sizes.of(W, requests)
        # Padding rows are written to the slots after the other rows.
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
            # Recording also computes the step, and writes its keys and values.
            recording = self._steps[shape] = self._recorded(packed, store, step, shape)
            self.memory.add(size, recording.recorded.nbytes)
        else:
            self.memory.stepped()
            return None
        recording.recorded.replay()
        self.replayed += 1
        (hidden,) = recording.recorded.results
        # A copy, because proposers keep hidden states and the next replay overwrites them.
        return hidden.view(shape.requests, size, -1)[:N, :W].clone().flatten(0, 1)

    def _recorded(
        self, packed: PackedDecoder, store: KVStore, step: Verification, shape: Shape
    ) -> _RecordedStep:
        rows = shape.requests, shape.size
        # A path has the stem and at most all rows of its tree.
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
            states = packed.forward(
                ids_NW, positions_NW, kv_cache=view, aux_layers=self._aux_layers
            )
            return (states.side_by_side().flatten(0, 1),)

        return compute


def _values(step: Verification, size: int) -> list[Tensor]:
    """The inputs of a step: tokens, their slots and, for trees, positions and paths.

    Padding requests are zeros, in rows of the store that no request uses. Padding rows have their
    own slots. In trees, they attend to the first slot.
    """
    slots = step.slots_BT
    if size > slots.shape[1]:
        more = torch.arange(1, 1 + size - slots.shape[1], device=slots.device)
        slots = torch.cat([slots, slots[:, -1:] + more], 1)
    values = [step.ids_BT, slots]
    return values if step.paths is None else [*values, step.positions_BT, step.paths]
