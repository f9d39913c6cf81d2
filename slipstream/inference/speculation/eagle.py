"""Drafts from an EAGLE head: a chain of tokens, each from the predicted feature of the one before.

The head keeps keys and values of its own, one row per running request, from true features only:
what it computed over its own predictions lies in later slots and is overwritten. Features that came
while nothing was drafted wait, and are caught up with when drafting begins again. A request whose
earlier features are unknown is drafted for from where they begin: slots, and the positions of the
head's rotary embedding, count from there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.errors import EngineError
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models.draft_head import DraftHead, PackedDraftHead
from slipstream.models.draft_pass import DraftPass, draft_chain
from slipstream.models.hf_io import copy_tensors, tensor_problems
from slipstream.models.numerics import activation_dtype
from slipstream.sampling.choose import choose, draw
from slipstream.types import WeightUpdate

_log = logging.getLogger(__name__)

_COLUMNS = 64
"""Most columns that are caught up with at once; the mask grows with them."""


@dataclass(slots=True)
class _Row:
    """One request: `cached` slots are filled; features that it began with may wait, each with the
    token after it."""

    cached: int = 0
    features: Tensor | None = None
    tokens: Sequence[int] = ()


@dataclass(slots=True)
class _Step:
    """What one step of the engine brought, not caught up with yet."""

    row_of: dict[str, int]
    tokens: Sequence[Sequence[int]]
    features_NWD: Tensor


class EagleProposer:
    """`Proposer` by a draft head of the policy's own size."""

    def __init__(
        self,
        head: DraftHead,
        *,
        dtype: torch.dtype,
        kv_budget_bytes: int = 1 << 30,
        waiting_bytes: int = 1 << 28,
        free_cache: bool = True,
    ) -> None:
        """Keys and values of the head take at most `kv_budget_bytes`; while the running batch needs
        more, nothing is drafted, which is said once. Features that wait take at most
        `waiting_bytes`; beyond, the oldest are forgotten and rows begin anew after them. With
        `free_cache` the memory of keys and values is given back when no request is left."""
        self._head = head
        device = head.fc.weight.device
        self._dtype = activation_dtype(dtype, device)
        with torch.no_grad():
            self._packed: PackedDraftHead = head.pack(dtype)
        self._store = KVStore(replace(head.config, num_layers=1), dtype, device, kv_budget_bytes)
        self._rows: dict[str, _Row] = {}
        self._order: list[str] = []
        self._steps: deque[_Step] = deque()
        self._waiting = 0
        self._waiting_bytes = waiting_bytes
        self._short_of_memory = False
        self._free_cache = free_cache

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
            row.features = self._as_read(features_TD)
            row.tokens = context[len(context) - len(features_TD) :]

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        if features_NWD is None:
            raise EngineError("an EAGLE head drafts from the policy's features; this step has none")
        features_NWD = self._as_read(features_NWD)
        row_of = {name: i for i, name in enumerate(request_ids)}
        self._steps.append(_Step(row_of, tokens, features_NWD))
        self._waiting += features_NWD.nbytes
        while self._waiting > self._waiting_bytes:
            oldest = self._steps.popleft()
            self._waiting -= oldest.features_NWD.nbytes
            for name in oldest.row_of:
                if name in self._rows:
                    self._rows[name] = _Row()

    def end(self, request_id: str) -> None:
        """See `Proposer`."""
        if self._rows.pop(request_id, None) is None:
            return
        for step in self._steps:
            # It may come back, and bring all its features.
            step.row_of.pop(request_id, None)
        index, last = self._order.index(request_id), len(self._order) - 1
        if index != last:
            moved = self._order[last]
            if self._rows[moved].cached:
                self._store.move(last, index, self._rows[moved].cached)
            self._order[index] = moved
        self._order.pop()
        if not self._order:
            self._forget_steps()
            if self._free_cache:
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
        rows = [self._rows[name] for name in self._order]
        ours, theirs = self._packed.fc.weight.dtype, batch.policy.compute_dtype
        if ours != theirs:
            # Kernels would read past the end of one of them.
            raise EngineError(f"the policy computes in {theirs}, and the draft head in {ours}")
        waiting = self._waiting_tokens()
        tokens = [waiting[name] for name in self._order]
        if not all(tokens):
            # A request came back without features; one plain step brings the first.
            return batch.chains([()] * len(rows))
        ends = [row.cached + len(new) for row, new in zip(rows, tokens, strict=True)]
        width = max(map(len, tokens))
        longest = max(row.cached for row in rows) + width + plan.steps
        if not self._store.fits(len(rows), longest):
            self._say_short_of_memory(len(rows), longest)
            return batch.chains([()] * len(rows))
        self._store.reserve(len(rows), longest)
        starts = [row.cached for row in rows]
        if self._packed.together is not None and not batch.rows.cuts:
            chains = self._at_once(batch, plan.steps, starts, tokens)
            self._caught_up(ends)
            return chains
        features_NTD = self._waiting_features(width)
        self._caught_up(ends)
        columns = [
            [*range(start, start + width), *range(end, end + plan.steps - 1)]
            for start, end in zip(starts, ends, strict=True)
        ]
        padded = [[*new] + [0] * (width - len(new)) for new in tokens]
        device = batch.positions_N.device
        slots_NC = torch.tensor(columns, device=device)
        ids_NT = torch.tensor(padded, device=device)
        done = 0
        hidden: list[Tensor] = []
        while width - done > _COLUMNS:
            part = slice(done, done + _COLUMNS)
            early = self._pass(batch, slots_NC[:, part], longest)
            hidden.append(early.run(0, ids_NT[:, part], features_NTD[:, part]))
            done += _COLUMNS
        run = self._pass(batch, slots_NC[:, done:], longest)
        hidden.append(run.run(0, ids_NT[:, done:], features_NTD[:, done:]))
        all_hidden = torch.cat(hidden, 1) if len(hidden) > 1 else hidden[0]
        lasts = [i * width + len(new) - 1 for i, new in enumerate(tokens)]
        hidden_ND = all_hidden.flatten(0, 1)[torch.tensor(lasts, device=device)]
        drafts = [_choose(batch, hidden_ND, 0)]
        for step in range(1, plan.steps):
            column = width - done + step - 1
            hidden_ND = run.run(column, drafts[-1][:, None], hidden_ND[:, None])[:, 0]
            drafts.append(_choose(batch, hidden_ND, step))
        return batch.chains(torch.stack(drafts, 1).tolist())

    def _at_once(
        self,
        batch: DraftBatch,
        steps: int,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> list[DraftTree]:
        addresses = self._waiting_addresses()
        drafted = draft_chain(
            self._packed,
            batch.policy,
            self._store.data[0],
            starts,
            tokens,
            [addresses[name] for name in self._order],
            batch.rows.keys_N2,
            batch.positions_N.tolist(),
            batch.rows.temperature_N,
            steps,
        )
        return batch.chains(drafted.t().tolist())

    def _as_read(self, features: Tensor) -> Tensor:
        """Rows one after another, for they may be read by address."""
        if features.dtype != self._dtype:
            raise EngineError(f"features are {features.dtype}, and the draft head is {self._dtype}")
        return features.contiguous()

    def _caught_up(self, ends: Sequence[int]) -> None:
        for name, end in zip(self._order, ends, strict=True):
            row = self._rows[name]
            row.cached, row.features, row.tokens = end, None, ()
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._steps.clear()
        self._waiting = 0

    def _pass(self, batch: DraftBatch, slots_NC: Tensor, num_keys: int) -> DraftPass:
        kv = self._store.data[0]
        return DraftPass(self._packed, batch.policy.embedding, kv, slots_NC, num_keys)

    def _waiting_tokens(self) -> dict[str, list[int]]:
        """By request, the token after each feature that waits."""
        found = {name: list(row.tokens) for name, row in self._rows.items()}
        for step in self._steps:
            for name, i in step.row_of.items():
                found[name] += step.tokens[i]
        return found

    def _waiting_addresses(self) -> dict[str, list[int]]:
        """By request, where the features that wait lie in memory, a row each."""
        found: dict[str, list[int]] = {}
        for name, row in self._rows.items():
            begun = row.features
            found[name] = [] if begun is None else [*_addresses(begun.data_ptr(), *begun.shape)]
        for step in self._steps:
            start, (_, width, size) = step.features_NWD.data_ptr(), step.features_NWD.shape
            for name, i in step.row_of.items():
                first = start + 4 * i * width * size
                found[name] += _addresses(first, len(step.tokens[i]), size)
        return found

    def _waiting_features(self, width: int) -> Tensor:
        """Features that wait, (N, width, D), those of a row first."""
        if len(self._steps) == 1 and all(self._rows[name].features is None for name in self._order):
            (step,) = self._steps
            index = [step.row_of[name] for name in self._order]
            features = step.features_NWD[:, :width]
            if index == list(range(len(features))):
                return features
            return features[torch.tensor(index, device=features.device)]
        parts = [self._row_features(name) for name in self._order]
        count, size = len(parts), parts[0][0].shape[-1]
        padded = parts[0][0].new_zeros(count, width, size)
        for row, part in zip(padded, parts, strict=True):
            torch.cat(part, out=row[: sum(map(len, part))])
        return padded

    def _row_features(self, name: str) -> list[Tensor]:
        begun = self._rows[name].features
        found = [] if begun is None else [begun]
        for step in self._steps:
            if name in step.row_of:
                i = step.row_of[name]
                found.append(step.features_NWD[i, : len(step.tokens[i])])
        return found

    def _say_short_of_memory(self, rows: int, length: int) -> None:
        if not self._short_of_memory:
            _log.warning(
                "nothing is drafted while %d requests of %d tokens run: their keys and values in "
                "the draft head are beyond its budget; raise kv_budget_bytes",
                rows,
                length,
            )
        self._short_of_memory = True


def _addresses(first: int, count: int, size: int) -> range:
    """Of `count` rows of `size` fp32 numbers."""
    return range(first, first + 4 * count * size, 4 * size)


def _choose(batch: DraftBatch, hidden_ND: Tensor, step: int) -> Tensor:
    """Drafted tokens (N,): argmax of log q + G, with the noise of the position that they are for.

    Over the temperature, logits and log q differ by a constant, so no distribution is needed.
    """
    rows, positions = batch.rows, batch.positions_N + step
    logits_NV = batch.policy.lm_head(hidden_ND).float()
    if rows.cuts:
        return choose(logits_NV, positions, rows).tokens
    if rows.any_tempered:
        heat_N = torch.where(rows.temperature_N == 0, 1.0, rows.temperature_N)
        logits_NV = logits_NV / heat_N[:, None]
    return draw(logits_NV, positions, rows)
