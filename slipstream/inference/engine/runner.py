"""Weights and forward passes of the engine. Knows rows and positions, not requests' lifetimes.

Shapes: N rows of a decode step (padded to the row multiple), U distinct contexts of a prefill,
M rows that share them, D hidden width, F width of auxiliary and final states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.inference.engine.choice_graphs import ChoiceGraphs
from slipstream.inference.engine.graph_shapes import ROWS, Choices
from slipstream.inference.engine.graphs import DecodeGraphs
from slipstream.inference.engine.kv_cache import (
    DecodeView,
    ExtendView,
    KVStore,
    PrefillView,
    row_places,
)
from slipstream.inference.engine.recorder import CudaRecorder
from slipstream.inference.engine.verification import Verification
from slipstream.inference.weights import checked_buckets, checked_tensors
from slipstream.models.copy_in_place import copy_in_place
from slipstream.models.cpu_attention import KeyPlaces
from slipstream.models.decoder import (
    Decoder,
    HiddenStates,
    PlacedKVCache,
    supports_varlen,
)
from slipstream.models.hf_io import copy_tensors
from slipstream.models.numerics import ROW_MULTIPLE, pad_rows, round_up
from slipstream.models.single_copy_weights import pack_in_place, write
from slipstream.sampling.choose import Choice, SamplingRows, choose
from slipstream.types import WeightUpdate


class Runner:
    """The policy in compute form, and one batch at a time through it."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        *,
        eager: bool = False,
        aux_layers: tuple[int, ...] = (),
        choices: Choices | None = None,
        one_copy: bool = False,
    ) -> None:
        """Unless `eager`, decode steps on a GPU become recordings, `choices` of draft plans as in
        `DecodeGraphs`. Hidden states come with the inputs of the layers `aux_layers`."""
        self.config = decoder.config
        self.aux_layers = aux_layers
        self.dtype = dtype
        self.device = decoder.device
        self._decoder = decoder
        self.one_copy = one_copy
        self._pack()
        self.graphs: DecodeGraphs | None = None
        self.choice_graphs: ChoiceGraphs | None = None
        if self.device.type == "cuda" and not eager:
            recorder = CudaRecorder()
            self.graphs = DecodeGraphs(recorder, aux_layers, choices)
            self.choice_graphs = ChoiceGraphs(recorder, self.config.vocab_size)

    def _pack(self) -> None:
        if self.one_copy:
            self.packed = pack_in_place(self._decoder, self.dtype)
        else:
            with torch.no_grad():
                self.packed = self._decoder.pack(self.dtype)
        # Asked for in every step, and no different from one to the next.
        self.tokens_multiple = self.packed.row_multiple
        """Tokens of a forward pass, padding included, come in so many."""
        self.row_by_row = supports_varlen(self.config, self.packed.compute_dtype, self.device)
        """Whether the rows of a step need no matrix."""

    @property
    def row_multiple(self) -> int:
        """Rows of a decode step, padding included, come in so many at most."""
        return self.tokens_multiple if self.graphs is None else ROWS

    def check(self, update: WeightUpdate) -> dict[str, Tensor]:
        """The tensors of an update that fits. Raises EngineError for one that does not."""
        return checked_tensors(self._decoder, update, self.dtype, what="weight update")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights by tensors that `check` returned."""
        copy_tensors(self._decoder, tensors)
        if self.graphs is None:
            self._pack()
            return
        with torch.no_grad():
            copy_in_place(self.packed, self._decoder.pack(self.dtype))

    def take(self, update: WeightUpdate) -> None:
        """Write an update over the weights in use, as it comes. Raises EngineError for one that
        does not fit, when some of it is there."""
        for tensors in checked_buckets(self._decoder, update, self.dtype):
            write(self._decoder, self.packed, tensors)

    def forget_recordings(self) -> None:
        """The store is about to give its memory back, and training needs theirs, too."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.choice_graphs is not None:
            self.choice_graphs.clear()

    def prefill(
        self, store: KVStore, contexts: Sequence[Sequence[int]], rows: list[int], sources: list[int]
    ) -> Tensor:
        """Compute each distinct context once, fill the rows that share it.

        Returns the hidden states of the contexts side by side, (U, T, F), padded on the right.
        """
        ids, width = self._padded(contexts)
        positions = self._positions(torch.arange(width, device=self.device))
        positions = positions.expand(len(contexts), -1)
        view = PrefillView(store, rows, sources, width)
        hidden = self.packed.forward(ids, positions, kv_cache=view, aux_layers=self.aux_layers)
        view.finish()
        return hidden.side_by_side()

    def extend(
        self,
        store: KVStore,
        rests: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
    ) -> Tensor:
        """Go on with contexts whose first `starts` tokens are in `rows`: to each row its rest.

        Returns the hidden states of the rests side by side, (U, T, F), padded on the right.
        """
        ids, width = self._padded(rests)
        first_U1 = torch.tensor(starts, device=self.device)[:, None]
        positions = self._positions(first_U1 + torch.arange(width, device=self.device))
        view = ExtendView(store, rows, starts, [len(rest) for rest in rests], width)
        return self.packed.forward(
            ids, positions, kv_cache=view, aux_layers=self.aux_layers
        ).side_by_side()

    def split(self, states: Tensor) -> HiddenStates:
        """Of states that stand side by side."""
        return HiddenStates.split(states, self.config.hidden_size)

    def _padded(self, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
        width = round_up(max(map(len, contexts)), ROW_MULTIPLE)
        ids = torch.zeros(len(contexts), width, dtype=torch.int64)
        for i, context in enumerate(contexts):
            ids[i, : len(context)] = torch.tensor(context)
        return ids.to(self.device), width

    def _positions(self, slots: Tensor) -> Tensor:
        # Padding and drafts may reach beyond the last position that the model knows; nothing of
        # them is kept.
        return slots.clamp(max=self.config.max_position_embeddings - 1)

    def decode(self, store: KVStore, step: Verification) -> HiddenStates:
        """Tokens that are known and drafts after them: cache them, and return their hidden states
        (M, ...), after which those of padding may come."""
        ids, slots, longest = step.ids_BT, step.slots_BT, step.longest
        view: PlacedKVCache | KeyPlaces
        if step.rows_M is not None:
            positions = step.positions_BT.flatten()
            view = row_places(store, step.rows_M, slots.flatten(), positions, step.paths, longest)
        else:
            if self.graphs is not None:
                states = self.graphs.decode(self.packed, store, step)
                if states is not None:
                    return self.split(states)
            view = DecodeView(store, slots, longest, step.shortest, step.paths)
        at = self._positions(step.positions_BT)
        return self.packed.forward(ids, at, kv_cache=view, aux_layers=self.aux_layers).flat()

    def choose(
        self,
        hidden_ND: Tensor,
        positions_N: Tensor,
        rows: SamplingRows,
    ) -> Choice:
        """Next tokens of `rows`, to stand at `positions_N`; `hidden_ND` may have more rows."""
        if self.choice_graphs is not None:
            return self.choice_graphs.choose(self._choose, hidden_ND, positions_N, rows)
        return self._choose(hidden_ND, positions_N, rows)

    def _choose(self, hidden_ND: Tensor, positions_N: Tensor, rows: SamplingRows) -> Choice:
        logits = self.packed.lm_head(pad_rows(hidden_ND, self.tokens_multiple)).float()
        return choose(logits[: len(positions_N)], positions_N, rows)
