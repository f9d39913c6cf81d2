"""Contexts of new requests into keys and values: together, or a long one in pieces.

A piece is as long as one prefill may be; between two of them the running requests decode. Where
pieces end does not matter: in exact mode a token's numbers depend on those before it, not on how
many are computed at once. Knows nothing about sampling. Called by `engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.inference.engine.kv_cache import KVPrefix, KVStore
from slipstream.inference.engine.request import Running
from slipstream.inference.engine.runner import Runner
from slipstream.inference.engine.scheduler import Admission, Head, Scheduler
from slipstream.models.decoder import HiddenStates
from slipstream.models.numerics import ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Result of a prefill of M requests.

    `last` are the states of their last tokens (M, ...); `states` those of all tokens, side by side
    (T, F) by request id, less what was taken over; then tokens: computed, of equal contexts, taken
    over from other requests.
    """

    last: HiddenStates
    states: dict[str, Tensor]
    computed: int
    shared: int
    reused: int


class Prefill:
    """Prefills of one engine."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_tokens: int,
        new_row: Callable[[], KVStore],
    ) -> None:
        """`max_tokens` bounds one pass, padding included; `new_row` gives a store of one row."""
        self._runner = runner
        self._scheduler = scheduler
        self._piece = max_tokens - max_tokens % ROW_MULTIPLE
        self._new_row = new_row

    def piece(self, request: Running, weights: int) -> int:
        """Go on with a context too long for one pass. Returns how many tokens were computed."""
        partial = self._scheduler.partial
        if partial is None or partial.request is not request:
            partial = self._scheduler.begin_partial(request, self._new_row(), weights)
        end = min(partial.done + self._piece, request.length)
        tokens = request.context[partial.done : end]
        states = self._runner.extend(partial.store, [tokens], [0], [partial.done])
        partial.features.append(states[0, : len(tokens)])
        partial.done = end
        return len(tokens)

    def together(self, admission: Admission) -> Prefilled:
        """Prefill what is left of the contexts of fresh requests, each distinct one once."""
        fresh, heads = admission.fresh, list(admission.heads.values())
        index = {context: i for i, context in enumerate(admission.heads)}
        contexts = list(index)
        sources = [index[tuple(r.context)] for r in fresh]
        rows = [self._scheduler.row(r) for r in fresh]
        starts = [0 if head is None else head.length for head in heads]
        if any(starts):
            states = self._extend(contexts, heads, rows, sources)
        else:
            states = self._runner.prefill(self._scheduler.store, contexts, rows, sources)
        last = torch.tensor([r.length - 1 - starts[s] for r, s in zip(fresh, sources, strict=True)])
        found = {}
        for request, s in zip(fresh, sources, strict=True):
            rest, head = states[s, : request.length - starts[s]], heads[s]
            known = [] if head is None else head.features
            found[request.request_id] = torch.cat([*known, rest]) if known else rest
        length = sum(map(len, contexts))
        return Prefilled(
            last=self._runner.split(
                states[torch.tensor(sources, device=states.device), last.to(states.device)]
            ),
            states=found,
            computed=length - sum(starts),
            shared=sum(r.length for r in fresh) - length,
            reused=sum(0 if head is None else head.reused for head in heads),
        )

    def _extend(
        self,
        contexts: list[tuple[int, ...]],
        heads: list[Head | None],
        rows: list[int],
        sources: list[int],
    ) -> Tensor:
        store = self._scheduler.store
        firsts = [rows[sources.index(i)] for i in range(len(contexts))]
        rests, starts = [], []
        for context, head, row in zip(contexts, heads, firsts, strict=True):
            if head is not None:
                store.put(row, head.kv)
            starts.append(0 if head is None else head.length)
            rests.append(context[starts[-1] :])
        states = self._runner.extend(store, rests, firsts, starts)
        for row, source in zip(rows, sources, strict=True):
            if row != firsts[source]:
                store.move(firsts[source], row, len(contexts[source]))
        return states

    def apart(self, request: Running) -> KVPrefix:
        """Keys and values of all but the last token of a context, in memory of their own."""
        store, count = self._new_row(), request.length - 1
        store.reserve(1, request.length)
        for start in range(0, count, self._piece):
            tokens = request.context[start : min(start + self._piece, count)]
            self._runner.extend(store, [tokens], [0], [start])
        return store.take(0, count)
