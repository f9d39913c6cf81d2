"""Drafts from an EAGLE head: a chain of tokens, each from the predicted feature of the one before.

The head keeps keys and values of its own, one row per running request, from true features only:
what it computed over its own predictions lies in later slots and is overwritten. Features that came
while nothing was drafted wait, and are caught up with in one pass when drafting begins again. A
request whose earlier features are unknown is drafted for from where they begin: slots, and the
positions of the head's rotary embedding, count from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.errors import EngineError
from slipstream.inference.engine.kv_cache import DecodeView, KVStore
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models.draft_head import DraftHead, PackedDraftHead
from slipstream.models.hf_io import copy_tensors, tensor_problems
from slipstream.models.numerics import ROW_MULTIPLE, pad_rows, round_up
from slipstream.sampling.choose import choose
from slipstream.types import WeightUpdate

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request: `cached` slots are filled; `features` and the tokens after them wait."""

    cached: int = 0
    features: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Entry i follows the i-th waiting feature."""


class EagleProposer:
    """`Proposer` by a draft head of the policy's own size."""

    def __init__(
        self, head: DraftHead, *, dtype: torch.dtype, kv_budget_bytes: int = 1 << 30
    ) -> None:
        """Keys and values of the head take at most `kv_budget_bytes`; while the running batch needs
        more, nothing is drafted, which is said once."""
        self._head = head
        self._dtype = dtype
        device = head.fc.weight.device
        with torch.no_grad():
            self._packed: PackedDraftHead = head.pack(dtype)
        self._store = KVStore(replace(head.config, num_layers=1), dtype, device, kv_budget_bytes)
        self._rows: dict[str, _Row] = {}
        self._order: list[str] = []
        self._short_of_memory = False

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        row = self._rows[request_id] = _Row()
        self._order.append(request_id)
        if features_TD is not None:
            row.features.append(features_TD)
            row.tokens.extend(context[1:])

    def observe(self, request_id: str, tokens: Sequence[int], features_PD: Tensor | None) -> None:
        """See `Proposer`."""
        row = self._rows[request_id]
        if features_PD is not None:
            row.features.append(features_PD)
            row.tokens.extend(tokens)
        elif row.features:
            row.tokens.extend(tokens)

    def end(self, request_id: str) -> None:
        """See `Proposer`."""
        if self._rows.pop(request_id, None) is None:
            return
        index, last = self._order.index(request_id), len(self._order) - 1
        if index != last:
            moved = self._order[last]
            if self._rows[moved].cached:
                self._store.move(last, index, self._rows[moved].cached)
            self._order[index] = moved
        self._order.pop()
        if not self._order:
            self._store.release()

    def update(self, update: WeightUpdate) -> None:
        """See `LearningProposer`. What the head had cached is dropped: running requests are drafted
        for from the features that still wait, or from the next one on."""
        tensors = dict(update.tensors())
        problems = tensor_problems(self._head, tensors)
        if problems:
            raise EngineError(
                f"draft head update to version {update.version} refused, the weights in use stay: "
                + "; ".join(problems[:3])
            )
        copy_tensors(self._head, tensors)
        with torch.no_grad():
            self._packed = self._head.pack(self._dtype)
        for row in self._rows.values():
            row.cached = 0

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """See `Proposer`."""
        if list(batch.request_ids) != self._order:
            raise EngineError("the rows of the draft head are not those of the engine")
        if not all(row.features for row in self._rows.values()):
            # A request came back without features; one plain step brings the first.
            return batch.chains([()] * len(self._order))
        rows = [self._rows[name] for name in self._order]
        waiting = [len(row.tokens) for row in rows]
        ends = [row.cached + count for row, count in zip(rows, waiting, strict=True)]
        longest = max(row.cached for row in rows) + max(waiting) + plan.steps
        if not self._store.fits(len(rows), longest):
            self._say_short_of_memory(len(rows), longest)
            return batch.chains([()] * len(rows))
        self._store.reserve(len(rows), longest)
        hidden_ND = self._catch_up(batch, rows, max(waiting))
        drafts: list[Tensor] = []
        slots_N = torch.tensor(ends, device=hidden_ND.device)
        for step in range(plan.steps):
            if step:
                slots = slots_N + (step - 1)
                hidden_ND = self._step(
                    batch, drafts[-1], hidden_ND, slots, (max(ends) + step, min(ends) + step)
                )
            logits = batch.policy.lm_head(pad_rows(hidden_ND)).float()[: len(rows)]
            positions = batch.positions_N + step
            drafts.append(choose(logits, positions, batch.rows, batch.noise(step)).tokens)
        return batch.chains(torch.stack(drafts, 1).tolist())

    def _say_short_of_memory(self, rows: int, length: int) -> None:
        if not self._short_of_memory:
            _log.warning(
                "nothing is drafted while %d requests of %d tokens run: their keys and values in "
                "the draft head are beyond its budget; raise kv_budget_bytes",
                rows,
                length,
            )
        self._short_of_memory = True

    def _catch_up(self, batch: DraftBatch, rows: list[_Row], width: int) -> Tensor:
        """Run the head over the features that wait; what follows each row's last, (N, D)."""
        first = rows[0].features[0]
        count = round_up(len(rows), ROW_MULTIPLE)
        ids = torch.zeros(count, width, dtype=torch.int64)
        features = first.new_zeros(count, width, first.shape[-1])
        for i, row in enumerate(rows):
            ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
            torch.cat(row.features, out=features[i, : len(row.tokens)])
        cached = [row.cached for row in rows]
        starts = torch.tensor(cached + [0] * (count - len(rows)))
        slots = (starts[:, None] + torch.arange(width)).to(first.device)
        lengths = (max(cached) + width, min(cached) + 1)
        hidden = self._forward(batch, ids.to(first.device), features, slots, lengths)
        lasts = torch.tensor([len(row.tokens) - 1 for row in rows], device=first.device)
        for row in rows:
            row.cached += len(row.tokens)
            row.features.clear()
            row.tokens.clear()
        return hidden[torch.arange(len(rows), device=first.device), lasts]

    def _step(
        self,
        batch: DraftBatch,
        ids_N: Tensor,
        hidden_ND: Tensor,
        slots_N: Tensor,
        lengths: tuple[int, int],
    ) -> Tensor:
        """One token further, from a prediction: (N, D)."""
        padded = (
            pad_rows(ids_N)[:, None],
            pad_rows(hidden_ND)[:, None],
            pad_rows(slots_N)[:, None],
        )
        hidden = self._forward(batch, *padded, lengths)
        return hidden[: len(ids_N), 0]

    def _forward(
        self,
        batch: DraftBatch,
        ids: Tensor,
        features: Tensor,
        slots: Tensor,
        lengths: tuple[int, int],
    ) -> Tensor:
        """`lengths`: as for `DecodeView`, the longest row with all its tokens and the shortest with
        its first."""
        limit = self._packed.config.max_position_embeddings - 1
        view = DecodeView(self._store, slots, *lengths)
        return self._packed.forward(
            ids, features, slots.clamp(max=limit), batch.policy.embedding, kv_cache=view
        )
