"""Who runs, who waits, who is set aside. Pure bookkeeping: no tensors are computed here.

Requests run in rows 0 .. n-1 of the KV store. They are served in order of arrival: when memory runs
short the newest one gives up its row, so the oldest always goes on. Its keys and values are
recomputed later if the weights are still those that computed them, and set aside otherwise:
recomputing under new weights would change the sample. What is set aside is not part of the budget.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from torch import Tensor

from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.request import Running


class Scheduler:
    """Dense rows, a queue in order of arrival, and preemption of the newest."""

    def __init__(
        self,
        store: KVStore,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        left: Callable[[Running], None],
    ) -> None:
        """`left` is called for each request that has given up its row, for whatever reason."""
        self.store = store
        self._left = left
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._saved: dict[str, Tensor] = {}
        self._arrivals = 0
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values: those of the store and those set aside."""
        return self.store.nbytes + sum(saved.nbytes for saved in self._saved.values())

    def add(self, request: Running) -> None:
        """Queue a new request behind all others."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def admit(self) -> tuple[list[Running], list[Running]]:
        """Move waiting requests into free rows: (to prefill, restored from set-aside memory).

        Bounded by the row limit, by memory, and per call by padded prefill tokens; requests with
        equal context count once, since they share a prefill.
        """
        fresh: list[Running] = []
        restored: list[Running] = []
        contexts: set[tuple[int, ...]] = set()
        longest = max((r.length for r in self.running), default=0)
        widest = 0
        while self.waiting and len(self.running) < self._max_num_seqs:
            candidate = self.waiting[0]
            # One more slot: the token that is sampled next will be cached in the step after.
            needed = max(longest, candidate.length + 1)
            if not self.store.fits(len(self.running) + 1, needed):
                break
            saved = candidate.request_id in self._saved
            if not saved:
                distinct = contexts | {tuple(candidate.context)}
                width = max(widest, candidate.length)
                if fresh and len(distinct) * width > self._max_prefill_tokens:
                    break
                contexts, widest = distinct, width
            self.running.append(self.waiting.pop(0))
            (restored if saved else fresh).append(candidate)
            longest = needed
        if fresh or restored:
            self.store.reserve(len(self.running), longest)
        for request in restored:
            self.store.put(self.row(request), self._saved.pop(request.request_id))
        return fresh, restored

    def make_room(self, weights: int) -> list[Running]:
        """Before a decode step: preempt the newest until one more token fits for everyone."""
        preempted = []
        while self.running:
            longest = max(r.length for r in self.running)
            if self.store.fits(len(self.running), longest):
                self.store.reserve(len(self.running), longest)
                break
            newest = max(self.running, key=_arrival)
            preempted.append(newest)
            self.preempt(newest, weights)
        return preempted

    def preempt(self, request: Running, weights: int) -> None:
        """Take a running request off its row, back to its place in the queue."""
        if request.kv_weights != {weights}:
            self._saved[request.request_id] = self.store.take(self.row(request), request.length - 1)
        self.remove(request)
        insort(self.waiting, request, key=_arrival)

    def unsaved(self) -> list[Running]:
        """Preempted requests whose keys and values are nowhere: to be recomputed or set aside."""
        return [r for r in self.waiting if r.token_ids and r.request_id not in self._saved]

    def set_aside(self, request: Running, saved: Tensor) -> None:
        """Keep the keys and values of a waiting request until it runs again."""
        self._saved[request.request_id] = saved

    def forget_kv(self) -> None:
        """Send every running request back to be prefilled again (weight update, recompute)."""
        self.waiting = sorted([*self.running, *self.waiting], key=_arrival)
        while self.running:
            self._left(self.running.pop())
        self._saved.clear()

    def remove(self, request: Running) -> None:
        """Free a row; the last row moves into it."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._saved.pop(request.request_id, None)
            return
        row, last = self.row(request), len(self.running) - 1
        if row != last:
            moved = self.running[last]
            self.store.move(last, row, moved.length - 1)
            self.running[row] = moved
        self.running.pop()
        self._left(request)

    def release_when_idle(self) -> None:
        """Give the store's memory back when nobody runs or waits."""
        if not self.running and not self.waiting:
            self.store.release()

    def row(self, request: Running) -> int:
        """Where a running request's keys and values are."""
        return self.running.index(request)

    def all(self) -> list[Running]:
        return [*self.running, *self.waiting]


def _arrival(request: Running) -> int:
    return request.arrival
