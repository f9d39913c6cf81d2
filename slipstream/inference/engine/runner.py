"""The weights and forward passes of the engine. It knows rows and positions, but no requests.

Shapes: N rows of a decode step (padded to the row multiple), M rows without padding, U distinct
contexts of a prefill, T tokens, D hidden width, F width of auxiliary and final states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.inference.engine.choice_graphs import ChoiceGraphs
from slipstream.inference.engine.graph_shapes import ROWS, Choices
from slipstream.inference.engine.graphs import DecodeGraphs
from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.kv_rows import Cache, KVRows
from slipstream.inference.engine.recorder import CudaRecorder
from slipstream.inference.engine.verification import Verification
from slipstream.inference.weights import checked_buckets, checked_tensors
from slipstream.models.copy_in_place import copy_in_place
from slipstream.models.decoder import Decoder, HiddenStates, supports_varlen
from slipstream.models.hf_io import copy_tensors
from slipstream.models.numerics import ROW_MULTIPLE, pad_rows, round_up
from slipstream.models.single_copy_weights import pack_in_place, write
from slipstream.sampling.choose import Choice, SamplingRows, choose
from slipstream.types import WeightUpdate


class Runner:
    """Runs prefill, decode and token sampling of one policy, one batch at a time."""

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
        """Unless `eager`, a GPU runs decode steps as CUDA graphs. `choices` lists the draft plans
        that may occur. `aux_layers` are layers whose inputs are returned with the final states.
        `one_copy` keeps single-copy weights."""
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
        # Computed here because every step needs them.
        self.tokens_multiple = self.packed.row_multiple
        """Tokens per forward pass, including padding, are a multiple of this."""
        self.row_by_row = supports_varlen(self.config, self.packed.compute_dtype, self.device)
        """Whether requests of a decode step may have different numbers of tokens without padding.
        """

    @property
    def row_multiple(self) -> int:
        """The KV store needs rows in multiples of this, so that padding requests have rows, too."""
        return self.tokens_multiple if self.graphs is None else ROWS

    def check(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Return the tensors of an update by name. Raises EngineError if it does not fit."""
        return checked_tensors(self._decoder, update, self.dtype, what="weight update")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights by tensors that `check` has returned."""
        copy_tensors(self._decoder, tensors)
        if self.graphs is None:
            self._pack()
            return
        with torch.no_grad():
            copy_in_place(self.packed, self._decoder.pack(self.dtype))

    def overwrite(self, update: WeightUpdate) -> None:
        """Overwrite single-copy weights bucket by bucket. Raises EngineError if a bucket does not
        fit; earlier buckets have been written then."""
        for tensors in checked_buckets(self._decoder, update, self.dtype):
            write(self._decoder, self.packed, tensors)

    def clear_graphs(self) -> None:
        """Delete all CUDA graphs and free their memory. Called before the KV store frees its
        memory, to which they refer."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.choice_graphs is not None:
            self.choice_graphs.clear()

    def prefill(
        self, store: KVRows, contexts: Sequence[Sequence[int]], rows: list[int], sources: list[int]
    ) -> Tensor:
        """Compute each distinct context once, and fill the rows that share it.

        `rows` are the rows to fill, and `sources` the index of the context of each of them.
        Returns auxiliary and final states of the contexts, (U, T, F), padded on the right.
        """
        ids, width = self._padded(contexts)
        positions = self._positions(torch.arange(width, device=self.device))
        positions = positions.expand(len(contexts), -1)
        cache, finish = store.prefill(rows, sources, list(map(len, contexts)), width)
        hidden = self.packed.forward(ids, positions, kv_cache=cache, aux_layers=self.aux_layers)
        finish()
        return hidden.side_by_side()

    def extend(
        self,
        store: KVRows,
        suffixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
    ) -> Tensor:
        """Continue contexts: compute `suffixes[i]` after the first `starts[i]` tokens, which are
        cached in row `rows[i]`.

        Returns auxiliary and final states of the suffixes, (U, T, F), padded on the right.
        """
        ids, width = self._padded(suffixes)
        first_U1 = torch.tensor(starts, device=self.device)[:, None]
        positions = self._positions(first_U1 + torch.arange(width, device=self.device))
        cache = store.extend(rows, starts, [len(suffix) for suffix in suffixes], width)
        return self.packed.forward(
            ids, positions, kv_cache=cache, aux_layers=self.aux_layers
        ).side_by_side()

    def split(self, states: Tensor) -> HiddenStates:
        """Split concatenated states (..., F) into auxiliary and final states."""
        return HiddenStates.split(states, self.config.hidden_size)

    def _padded(self, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
        """Token ids, padded on the right to a common width, and this width."""
        width = round_up(max(map(len, contexts)), ROW_MULTIPLE)
        ids = torch.zeros(len(contexts), width, dtype=torch.int64)
        for i, context in enumerate(contexts):
            ids[i, : len(context)] = torch.tensor(context)
        return ids.to(self.device), width

    def _positions(self, slots: Tensor) -> Tensor:
        # Padding and drafts may be beyond the model's last position. Their results are not used.
        return slots.clamp(max=self.config.max_position_embeddings - 1)

    def decode(self, store: KVRows, step: Verification) -> HiddenStates:
        """Run a decode step: cache keys and values of the last known tokens and their drafts.

        Returns their hidden states (M, ...); states of padding may follow.
        """
        ids, slots, longest = step.ids_BT, step.slots_BT, step.longest
        cache: Cache
        if step.rows_M is not None:
            assert isinstance(store, BlockStore), "only the kernels compute row by row"
            positions = step.positions_BT.flatten()
            cache = store.decode_rows(step.rows_M, slots.flatten(), positions, step.paths, longest)
        else:
            if self.graphs is not None and isinstance(store, KVStore):
                states = self.graphs.decode(self.packed, store, step)
                if states is not None:
                    return self.split(states)
            cache = store.decode(slots, longest, step.shortest, step.paths)
        at = self._positions(step.positions_BT)
        return self.packed.forward(ids, at, kv_cache=cache, aux_layers=self.aux_layers).flat()

    def choose(
        self,
        hidden_ND: Tensor,
        positions_N: Tensor,
        rows: SamplingRows,
    ) -> Choice:
        """Sample the tokens at `positions_N` from the hidden states of the tokens before them.

        `hidden_ND` may have more rows than there are positions.
        """
        if self.choice_graphs is not None:
            return self.choice_graphs.choose(self._choose, hidden_ND, positions_N, rows)
        return self._choose(hidden_ND, positions_N, rows)

    def _choose(self, hidden_ND: Tensor, positions_N: Tensor, rows: SamplingRows) -> Choice:
        logits = self.packed.lm_head(pad_rows(hidden_ND, self.tokens_multiple)).float()
        return choose(logits[: len(positions_N)], positions_N, rows)
