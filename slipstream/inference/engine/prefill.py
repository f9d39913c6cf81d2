"""Prefill: computes the keys and values of contexts, several at once or a long one in chunks.

A chunk has the maximum size of one prefill pass. The running requests decode between chunks. In
exact mode the chunk boundaries do not change the results, because the values of a token depend only
on the tokens before it. This module does not sample tokens. Called by `engine`.

Shapes: M requests, T tokens, D hidden width, F width of auxiliary and final states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.inference.engine.kv_rows import KVPrefix, KVRows
from slipstream.inference.engine.request import Running
from slipstream.inference.engine.runner import Runner
from slipstream.inference.engine.scheduler import Admission, ComputedPrefix, Scheduler
from slipstream.models.decoder import HiddenStates
from slipstream.models.numerics import ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of a prefill of M requests."""

    last: HiddenStates
    """Hidden states of the last token of each request, (M, D)."""
    states: dict[str, Tensor]
    """By request id: auxiliary and final states, concatenated (T, F), of the context tokens. States
    of the first tokens are missing if their keys and values were reused without states."""
    computed: int
    """Tokens that were computed."""
    shared: int
    """Tokens of contexts that are equal to another context of this prefill."""
    reused: int
    """Tokens whose keys and values were computed for other requests."""


class Prefill:
    """Runs the prefills of one engine."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_tokens: int,
        new_store: Callable[[], KVRows],
    ) -> None:
        """`max_tokens` limits the tokens of one pass, including padding. `new_store` makes an empty
        KV store."""
        self._runner = runner
        self._scheduler = scheduler
        self._chunk_size = max_tokens - max_tokens % ROW_MULTIPLE
        self._new_store = new_store

    def chunk(self, request: Running, weights: int) -> int:
        """Compute the next chunk of a context that is too long for one pass.

        Returns the number of tokens computed.
        """
        partial = self._scheduler.partial
        if partial is None or partial.request is not request:
            partial = self._scheduler.begin_partial(request, self._new_store(), weights)
        end = min(partial.done + self._chunk_size, request.length)
        tokens = request.context[partial.done : end]
        states = self._runner.extend(partial.store, [tokens], [0], [partial.done])
        partial.features.append(states[0, : len(tokens)])
        partial.done = end
        return len(tokens)

    def fresh(self, admission: Admission) -> Prefilled:
        """Prefill the contexts of fresh requests after their computed prefixes.

        Requests with equal contexts share one computation.
        """
        fresh, prefixes = admission.fresh, list(admission.prefixes.values())
        index = {context: i for i, context in enumerate(admission.prefixes)}
        contexts = list(index)
        sources = [index[tuple(r.context)] for r in fresh]
        rows = [self._scheduler.row(r) for r in fresh]
        starts = [0 if prefix is None else prefix.length for prefix in prefixes]
        if any(starts):
            states = self._extend(contexts, prefixes, rows, sources)
        else:
            states = self._runner.prefill(self._scheduler.store, contexts, rows, sources)
        last = torch.tensor([r.length - 1 - starts[s] for r, s in zip(fresh, sources, strict=True)])
        by_request = {}
        for request, s in zip(fresh, sources, strict=True):
            computed, prefix = states[s, : request.length - starts[s]], prefixes[s]
            known = [] if prefix is None else prefix.features
            by_request[request.request_id] = torch.cat([*known, computed]) if known else computed
        length = sum(map(len, contexts))
        return Prefilled(
            last=self._runner.split(
                states[torch.tensor(sources, device=states.device), last.to(states.device)]
            ),
            states=by_request,
            computed=length - sum(starts),
            shared=sum(r.length for r in fresh) - length,
            reused=sum(0 if prefix is None else prefix.reused for prefix in prefixes),
        )

    def _extend(
        self,
        contexts: list[tuple[int, ...]],
        prefixes: list[ComputedPrefix | None],
        rows: list[int],
        sources: list[int],
    ) -> Tensor:
        """Copy the computed prefixes to one row of each context, compute the remaining tokens, and
        copy the result to the other rows. Returns the states of the remaining tokens."""
        store = self._scheduler.store
        first_rows = [rows[sources.index(i)] for i in range(len(contexts))]
        suffixes, starts = [], []
        for context, prefix, row in zip(contexts, prefixes, first_rows, strict=True):
            if prefix is not None:
                store.restore(row, prefix.kv)
            starts.append(0 if prefix is None else prefix.length)
            suffixes.append(context[starts[-1] :])
        states = self._runner.extend(store, suffixes, first_rows, starts)
        for row, source in zip(rows, sources, strict=True):
            if row != first_rows[source]:
                store.share(first_rows[source], row, len(contexts[source]))
        return states

    def recompute(self, request: Running) -> KVPrefix:
        """Compute the keys and values of all but the last token of a context, outside the rows."""
        store, count = self._new_store(), request.length - 1
        store.reserve([request.length])
        for start in range(0, count, self._chunk_size):
            tokens = request.context[start : min(start + self._chunk_size, count)]
            self._runner.extend(store, [tokens], [0], [start])
        return store.view_prefix(0, count).clone()
