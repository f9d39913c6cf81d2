"""Drafts from an EAGLE head: chains or trees of tokens, each from the head's state at the one
before.

The head keeps keys and values of its own, one row per running request, from true features only:
what it computed over its own predictions lies in later slots and is overwritten. Features that came
while nothing was drafted wait, and are caught up with when drafting begins again. A request whose
earlier features are unknown is drafted for from where they begin: slots, and the positions of the
head's rotary embedding, count from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import EngineError
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.recorder import Recorder
from slipstream.inference.speculation.batched_trees import chain_by_columns, draft_tree_batched
from slipstream.inference.speculation.draft_graphs import (
    DraftGraphs,
    Drafting,
    DraftInputs,
    PrefillInput,
    most_columns,
)
from slipstream.inference.speculation.draft_temperature import DraftTemperature
from slipstream.inference.speculation.pending_features import (
    GONE,
    PendingFeatureQueue,
    PendingFeatures,
    PendingRequest,
)
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.inference.weights import checked_tensors
from slipstream.kernels.draft.tree import WIDTH
from slipstream.models.copy_in_place import copy_in_place
from slipstream.models.draft.forward import DraftPass, Ints, TreeDrafter
from slipstream.models.draft.model import DraftModel, PackedDraft
from slipstream.models.hf_io import copy_tensors
from slipstream.models.numerics import activation_dtype
from slipstream.sampling.tree import Candidates
from slipstream.types import WeightUpdate

_log = logging.getLogger(__name__)

_COLUMNS = 64
"""Most columns that are caught up with at once; the mask grows with them."""


class EagleProposer:
    """`Proposer` by a draft head."""

    def __init__(
        self,
        head: DraftModel,
        *,
        dtype: torch.dtype,
        kv_budget_bytes: int = 1 << 30,
        waiting_bytes: int = 1 << 28,
        free_cache: bool = True,
        record: Recorder | None = None,
    ) -> None:
        """Keys and values of the head take at most `kv_budget_bytes`; while the running batch needs
        more, nothing is drafted, which is said once. Features that wait take at most
        `waiting_bytes`, and those that requests begin with as much; beyond, the oldest are
        forgotten and rows begin anew after them. With
        `free_cache` the memory of keys and values is given back when no request is left. With
        `record` drafting becomes recordings, one for each plan and shape that is usual."""
        self._head = head
        device = head.device
        self._dtype, self._features_dtype = dtype, activation_dtype(dtype, device)
        self._width = head.config.hidden_size * max(1, len(head.aux_layers))
        with torch.no_grad():
            self._packed: PackedDraft = head.pack(dtype)
        self._store = KVStore(replace(head.config, num_layers=1), dtype, device, kv_budget_bytes)
        self._rows: dict[str, PendingRequest] = {}
        self._order: list[str] = []
        # The rows in that order, shared by what waits for them; None where they have changed. And
        # the engine's list of their names, the same one in each step of a batch.
        self._batch: list[PendingRequest] | None = None
        self._names: Sequence[str] = ()
        self._waiting = PendingFeatureQueue(waiting_bytes)
        self._temperature = DraftTemperature()
        self._drafter: TreeDrafter | None = None
        # Of the trees that are being verified.
        self._judged: Candidates | None = None
        self._graphs = None if record is None else DraftGraphs(record)
        # Of scores: the number, and it on the device.
        self._scale: tuple[float, Tensor] | None = None
        self._short_of_memory = False
        self._free_cache = free_cache

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `UsesAuxLayers`."""
        return self._head.aux_layers

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        row = self._rows[request_id] = PendingRequest(len(self._order))
        self._order.append(request_id)
        self._batch = None
        kept = None if features_TD is None else self._as_many_as_fit(self._as_read(features_TD))
        if kept is not None:
            row.features_TD, row.tokens = kept, context[len(context) - len(kept) :]

    def _as_many_as_fit(self, features_TD: Tensor) -> Tensor | None:
        """The last of them, beside what others began with; None where there is no room."""
        begun = (row.features_TD for row in self._rows.values())
        room = self._waiting.limit - sum(f.nbytes for f in begun if f is not None)
        count = room // (features_TD.shape[1] * features_TD.element_size())
        if count >= len(features_TD):
            return features_TD
        # Copied: the rest would be held on to.
        return features_TD[-count:].clone() if count > 0 else None

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        if features_NWD is None:
            raise EngineError("an EAGLE head drafts from the policy's features; this step has none")
        if self._judged is not None:
            firsts = zip(self._judged.tokens_NC[:, 0].tolist(), tokens, strict=True)
            # One that has just ended by an error has nothing new.
            right = [bool(new) and new[0] == first for first, new in firsts]
            self._temperature.learn(self._judged.gaps_NW, right)
            self._judged = None
        self._waiting.add(self._in_order(request_ids), tokens, self._as_read(features_NWD))

    def end(self, request_id: str) -> None:
        """See `Proposer`."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        last = self._rows.get(self._order[-1])
        # None where it is the last one itself.
        if last is not None:
            if last.cached:
                self._store.move(last.index, row.index, last.cached)
            self._order[row.index] = self._order[-1]
            last.index = row.index
        # It may come back, and bring all its features.
        row.index = GONE
        self._order.pop()
        self._batch = None
        if not self._order:
            self._waiting.clear()
            # It holds weights, which may be replaced before there is another request.
            self._drafter = None
            if self._free_cache:
                if self._graphs is not None:
                    self._graphs.clear()
                self._store.release()

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """See `Proposer`. A head learns elsewhere."""

    def update(self, update: WeightUpdate) -> None:
        """See `LearningProposer`. What the head had cached is dropped: running requests are drafted
        for from the features that still wait, or from the next one on."""
        what = "draft head update"
        copy_tensors(self._head, checked_tensors(self._head, update, self._dtype, what=what))
        with torch.no_grad():
            packed = self._head.pack(self._dtype)
        if self._graphs is None:
            self._packed = packed
        else:
            copy_in_place(self._packed, packed)
        for row in self._rows.values():
            row.cached = 0

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """See `Proposer`."""
        rows = self._in_order(batch.request_ids)
        ours, theirs = self._packed.dtype, batch.policy.compute_dtype
        if ours != theirs:
            # Kernels would read past the end of one of them.
            raise EngineError(f"the policy computes in {theirs}, and the draft head in {ours}")
        waiting = self._waiting.of(rows)
        if waiting is None:
            # A request came back without features; one plain step brings the first.
            return batch.chains([()] * len(rows))
        starts_N = np.array([row.cached for row in rows])
        ends_N = starts_N + waiting.counts_N
        width = int(waiting.counts_N.max())
        if self._graphs is not None:
            width = max(width, most_columns(plan))
        longest = int(starts_N.max()) + width + max(plan.steps - 1, 1) * plan.topk
        if not self._store.fits(len(rows), longest):
            self._say_short_of_memory(len(rows), longest)
            return batch.chains([()] * len(rows))
        self._store.reserve(len(rows), longest)
        trees = self._drafts(batch, plan, starts_N, waiting)
        for row, end in zip(rows, ends_N.tolist(), strict=True):
            row.cached, row.features_TD, row.tokens = end, None, ()
        self._waiting.clear()
        return trees

    def _drafts(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, waiting: PendingFeatures
    ) -> list[DraftTree]:
        packed = self._packed
        in_one_call = packed.fused is not None
        if plan.topk == 1 and (not in_one_call or batch.rows.any_truncated):
            drafts = self._by_columns(batch, plan, starts_N, waiting).tolist()
            pairs = zip(batch.last, drafts, strict=True)
            return [DraftTree.chain(last, chain, by_head=True) for last, chain in pairs]
        if in_one_call:
            candidates = self._in_one_call(packed, batch, plan, starts_N, waiting)
        else:
            candidates = self._by_levels(batch, plan, starts_N, waiting)
        if plan.topk == 1:
            # All of it is verified: nothing is asked of scores, and nothing learned of them.
            pairs = zip(batch.last, candidates.tokens_NC.tolist(), strict=True)
            return [DraftTree.chain(last, chain, by_head=True) for last, chain in pairs]
        self._judged = candidates
        # Of laws that are cut, too: what is cut off is seldom among the best.
        if not batch.as_matrix:
            best = candidates.best(
                len(batch.last) * (plan.verify_tokens - 1), batch.min_log_probability
            )
        else:
            best = candidates.best_of_each(plan.verify_tokens - 1, batch.min_log_probability)
        return [
            DraftTree([last, *tokens], [-1, *parents], len(tokens), scores)
            for last, (tokens, parents, scores) in zip(batch.last, best, strict=True)
        ]

    def _in_one_call(
        self,
        packed: PackedDraft,
        batch: DraftBatch,
        plan: DraftPlan,
        starts_N: Ints,
        waiting: PendingFeatures,
    ) -> Candidates:
        drafter = self._drafter
        if drafter is None or drafter.head is not packed or drafter.policy is not batch.policy:
            drafter = self._drafter = TreeDrafter(packed, batch.policy)
        return Candidates(
            *drafter(
                self._store.data[0],
                starts_N,
                waiting.counts_N,
                waiting.tokens_T,
                waiting.addresses(),
                batch.rows.keys_N2,
                batch.positions_N,
                batch.rows.temperature_N,
                plan.steps,
                plan.topk,
                batch.min_log_probability if plan.topk > 1 else -inf,
                self._temperature.value,
            )
        )

    def _in_order(self, request_ids: Sequence[str]) -> list[PendingRequest]:
        if self._batch is None or request_ids is not self._names:
            if list(request_ids) != self._order:
                raise EngineError("the rows of the draft head are not those of the engine")
            self._batch = [self._rows[name] for name in self._order]
            self._names = request_ids
        return self._batch

    def _by_columns(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, waiting: PendingFeatures
    ) -> Tensor:
        """Drafts (N, steps) by one call for the tokens that wait and one for each further draft."""

        def draft(batch: DraftBatch, waits: PrefillInput, num_keys: int) -> tuple[Tensor, ...]:
            given, kv = self._taken_in(batch, waits, num_keys), self._store.data[0]
            return (chain_by_columns(self._packed, kv, batch, given, num_keys, plan.steps),)

        (drafts,) = self._recorded(draft, batch, plan, starts_N, waiting)
        return drafts

    def _by_levels(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, waiting: PendingFeatures
    ) -> Candidates:
        """Candidates of trees, by one call for each level."""

        def draft(batch: DraftBatch, waits: PrefillInput, num_keys: int) -> tuple[Tensor, ...]:
            given, kv = self._taken_in(batch, waits, num_keys), self._store.data[0]
            shape = num_keys, plan.steps, plan.topk
            parts = draft_tree_batched(self._packed, kv, batch, given, *shape)
            # All in one: each tensor that is fetched is waited for. Tokens are not rounded.
            return (torch.cat([part.double() for part in parts], 1),)

        (together,) = self._recorded(draft, batch, plan, starts_N, waiting)
        numbers = together.cpu().numpy()
        wide = min(WIDTH, batch.policy.config.vocab_size)
        tokens, parents, scores = np.split(numbers[:, :-wide], 3, 1)
        return Candidates(
            tokens.astype(np.int64), parents.astype(np.int64), scores, numbers[:, -wide:]
        )

    def _recorded(
        self,
        drafting: Drafting,
        batch: DraftBatch,
        plan: DraftPlan,
        starts_N: Ints,
        waiting: PendingFeatures,
    ) -> tuple[Tensor, ...]:
        """What `drafting` gives after what waits; by a recording where there is one."""
        ids_NW, features_NWF = waiting.padded()
        device, width = features_NWF.device, ids_NW.shape[1]
        numbers = np.concatenate([starts_N[:, None], waiting.counts_N[:, None], ids_NW], 1)
        if self._scale is None or self._scale[0] != self._temperature.value:
            scale = self._temperature.value
            self._scale = scale, torch.tensor(scale, dtype=torch.float64, device=device)
        waits = PrefillInput(torch.from_numpy(numbers).to(device), features_NWF, self._scale[1])
        num_keys = int(starts_N.max()) + width + (plan.steps - 1) * plan.topk
        # Laws that are cut take as many tokens as there are.
        if self._graphs is None or batch.rows.any_truncated:
            return drafting(batch, waits, num_keys)
        return self._graphs.draft(drafting, batch, plan, waits, self._store.data[0], num_keys)

    def _taken_in(self, batch: DraftBatch, waits: PrefillInput, num_keys: int) -> DraftInputs:
        """What drafts begin with, once the head has taken in what waits."""
        starts_N, counts_N = waits.numbers[:, 0], waits.numbers[:, 1]
        ids_NW, width = waits.numbers[:, 2:], waits.width
        states_NWD = self._packed.to_states(waits.features)
        slots_NW = starts_N[:, None] + torch.arange(width, device=starts_N.device)
        hidden: list[Tensor] = []
        for start in range(0, width, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            kv = self._store.data[0]
            run = DraftPass(self._packed, batch.policy.embedding, kv, slots_NW[:, part], num_keys)
            hidden.append(run.run(0, ids_NW[:, part].contiguous(), states_NWD[:, part]))
        all_hidden = torch.cat(hidden, 1) if len(hidden) > 1 else hidden[0]
        # Rows of padding have none.
        lasts_N11 = (counts_N - 1).clamp(min=0)[:, None, None]
        last_ND = all_hidden.gather(1, lasts_N11.expand(-1, 1, all_hidden.shape[-1]))[:, 0]
        return DraftInputs(starts_N + counts_N, last_ND, waits.scale)

    def _as_read(self, features: Tensor) -> Tensor:
        """Rows one after another, for they may be read by address."""
        found, wanted = (features.shape[-1], features.dtype), (self._width, self._features_dtype)
        if found != wanted:
            raise EngineError(
                f"features are {found[0]} numbers of {found[1]}, and the draft head takes "
                f"{wanted[0]} of {wanted[1]}: it reads the layers {list(self.aux_layers)}"
            )
        return features.contiguous()

    def _say_short_of_memory(self, rows: int, length: int) -> None:
        if not self._short_of_memory:
            _log.warning(
                "nothing is drafted while %d requests of %d tokens run: their keys and values in "
                "the draft head are beyond its budget; raise kv_budget_bytes",
                rows,
                length,
            )
        self._short_of_memory = True
