"""The scheduler: which requests run, which wait, and which are preempted. It computes nothing.

Requests run in rows 0 to n-1 of the KV store and are served in order of arrival. If memory runs
short, the newest request is preempted, so the oldest one always continues. If the current weights
computed all keys and values of a preempted request, these are dropped and recomputed later.
Otherwise they are copied to saved memory, because recomputing them with new weights would change
the sample. Saved keys and values are not part of the KV budget. Neither is the one long context
that is being prefilled in chunks, until it gets a row.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.inference.engine.kv_rows import KVPrefix, KVRows
from slipstream.inference.engine.prefix_cache import BLOCK, PrefixCache
from slipstream.inference.engine.request import Running
from slipstream.models.numerics import ROW_MULTIPLE, round_up


@dataclass(frozen=True, slots=True)
class ComputedPrefix:
    """The first tokens of a context, whose keys and values need not be computed again."""

    kv: KVPrefix
    features: list[Tensor]
    """Hidden states of the last tokens of the prefix, in parts (T, D). They may be known for all
    tokens, some or none."""
    reused: int
    """How many of the tokens were computed for other requests."""

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def has_all_features(self) -> bool:
        return sum(map(len, self.features)) == self.length

    def first(self, count: int) -> ComputedPrefix:
        """The prefix cut to its first `count` tokens."""
        less = self.length - count
        features = [part[: len(part) - less] for part in self.features]
        return ComputedPrefix(self.kv.first(count), features, count)


@dataclass(slots=True)
class Partial:
    """A long context during chunked prefill: `done` of its tokens are cached in row 0 of its own
    store."""

    request: Running
    store: KVRows
    done: int = 0
    features: list[Tensor] = field(default_factory=list)
    reused: int = 0

    def prefix(self) -> ComputedPrefix:
        """The tokens that have been computed so far."""
        return ComputedPrefix(self.store.view_prefix(0, self.done), self.features, self.reused)


@dataclass(frozen=True, slots=True)
class Admission:
    """The requests that have just got a row, or a `long` one that needs chunked prefill first."""

    fresh: list[Running] = field(default_factory=list)
    """Requests whose context must be prefilled."""
    restored: list[Running] = field(default_factory=list)
    """Preempted requests whose keys and values were saved."""
    prefixes: dict[tuple[int, ...], ComputedPrefix | None] = field(default_factory=dict)
    """The computed prefix of each distinct context of `fresh`."""
    long: Running | None = None


class Scheduler:
    """Assigns requests to rows in order of arrival, and preempts the newest if memory is short."""

    def __init__(
        self,
        store: KVRows,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        on_row_freed: Callable[[Running], None],
        prefix_cache: PrefixCache | None = None,
        stagger: bool = False,
    ) -> None:
        """`on_row_freed` is called for each request that ends or is preempted. With `stagger`, a
        sample waits while another sample of its prompt runs, as long as requests for other prompts
        can use the rows."""
        self.store = store
        self.prefix_cache = prefix_cache
        self.partial: Partial | None = None
        self._on_row_freed = on_row_freed
        self._stagger = stagger
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._saved: dict[str, KVPrefix] = {}
        self._prompts: dict[tuple[int, ...], ComputedPrefix] = {}
        self._names: set[str] = set()
        self._arrivals = 0
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: of rows, saved requests and caches.

        Other threads may read it during a step, so collections are copied before iteration.
        """
        current = self.partial
        partial = 0 if current is None else current.store.nbytes
        cached = 0 if self.prefix_cache is None else self.prefix_cache.nbytes
        saved = sum(saved.nbytes for saved in list(self._saved.values()))
        return self.store.nbytes + partial + cached + saved + self._prompt_bytes

    def add(self, request: Running) -> None:
        """Add a new request at the end of the queue."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._names.add(request.request_id)
        self.waiting.append(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request with this id waits or runs."""
        return request_id in self._names

    def admit(self, weights: int) -> Admission:
        """Move waiting requests to free rows, to be prefilled or restored from saved memory.

        The limits are the number of rows, memory, and prefill tokens per call including padding.
        Requests with equal contexts share a prefill and count once. Keys and values of a prompt
        are reused for its other samples if the current weights computed them. `weights` is the
        number of the current weights, counted by loads.
        """
        admission = Admission()
        running_before = list(self.running)
        lengths = [r.length for r in self.running]
        widest = 0
        while self.waiting and len(self.running) < self._max_num_seqs:
            candidate = self._next_waiting()
            # One more slot for the next token, which will be cached in the step after.
            lengths.append(candidate.length + 1)
            if not self.store.fits(lengths):
                lengths.pop()
                break
            saved, context = candidate.request_id in self._saved, tuple(candidate.context)
            if not saved and candidate.wants_context:
                shared = admission.prefixes.get(context)
                if shared is not None and not shared.has_all_features:
                    # It needs hidden states that this prefill does not compute.
                    break
            if not saved and context not in admission.prefixes:
                prefix = self._computed_prefix(candidate, running_before, weights)
                remaining = candidate.length - (0 if prefix is None else prefix.length)
                width = max(widest, round_up(remaining, ROW_MULTIPLE))
                if (len(admission.prefixes) + 1) * width > self._max_prefill_tokens:
                    if not admission.fresh and not admission.restored:
                        return Admission(long=candidate)
                    break
                admission.prefixes[context], widest = prefix, width
            self.waiting.remove(candidate)
            self.running.append(candidate)
            self._drop_partial_of(candidate)
            self._drop_prompt(candidate.request.prompt_ids)
            (admission.restored if saved else admission.fresh).append(candidate)
        if admission.fresh or admission.restored:
            self.store.reserve(lengths[: len(self.running)])
        for request in admission.restored:
            self.store.restore(self.row(request), self._saved.pop(request.request_id))
        return admission

    def _computed_prefix(
        self, request: Running, running_before: Sequence[Running], weights: int
    ) -> ComputedPrefix | None:
        """The longest prefix of the request's context that is computed; None if there is none."""
        if self.partial is not None and self.partial.request is request:
            return self.partial.prefix()
        prompt = self._computed_prompt(request, running_before, weights)
        if request.wants_context:
            # The request needs hidden states, which cannot be derived from keys and values.
            return prompt if prompt is not None and prompt.has_all_features else None
        kv = None if self.prefix_cache is None else self.prefix_cache.find(request.context)
        if prompt is not None and (kv is None or prompt.length >= kv.length):
            return prompt
        return None if kv is None else ComputedPrefix(kv, [], kv.length)

    def _computed_prompt(
        self, request: Running, running_before: Sequence[Running], weights: int
    ) -> ComputedPrefix | None:
        """The request's prompt, if another sample of it runs or has left it here; else None."""
        prompt = request.request.prompt_ids
        count = min(len(prompt), request.length - 1)
        if count < BLOCK:
            return None
        kept = self._prompts.get(prompt)
        if kept is not None:
            return kept.first(count)
        for other in running_before:
            if other.kv_weights == {weights} and other.request.prompt_ids == prompt:
                return self._prompt_in_row(other).first(count)
        return None

    def _prompt_in_row(self, request: Running) -> ComputedPrefix:
        """A copy of the prompt of a running request."""
        count = len(request.request.prompt_ids)
        kv = self.store.view_prefix(self.row(request), count).clone()
        return ComputedPrefix(kv, request.prompt_features, count)

    def begin_partial(self, request: Running, store: KVRows, weights: int) -> Partial:
        """Start the chunked prefill of `request` in `store`. The chunked prefill of another
        request is dropped and starts again later."""
        prefix = self._computed_prefix(request, self.running, weights)
        store.reserve([request.length])
        self.partial = Partial(request, store)
        if prefix is not None:
            store.restore(0, prefix.kv)
            self.partial = Partial(request, store, prefix.length, prefix.features, prefix.reused)
        return self.partial

    def _drop_partial_of(self, request: Running) -> None:
        if self.partial is not None and self.partial.request is request:
            self.partial = None

    def cache_kv(self, request: Running, weights: int) -> None:
        """Cache keys and values of a request that ends, for contexts with the same prefix.

        Does nothing if the current weights did not compute all of them.
        """
        if request not in self.running or request.kv_weights != {weights}:
            return
        self._keep_prompt(request)
        if self.prefix_cache is None:
            return
        count = request.length - 1
        used = self.store.nbytes + self._prompt_bytes + self.store.prefix_size(count)
        free = self.store.budget - used
        if free >= 0:
            self.prefix_cache.shrink(free)
            kv = self.store.view_prefix(self.row(request), count).clone()
            self.prefix_cache.add(request.context[:count], kv)

    def _keep_prompt(self, request: Running) -> None:
        """Keep a copy of the request's prompt if staggered samples of it wait."""
        prompt = request.request.prompt_ids
        if not self._stagger or len(prompt) < BLOCK or not self._has_waiting(prompt):
            return
        if self.kv_bytes + self.store.prefix_size(len(prompt)) <= self.store.budget:
            self._prompts[prompt] = self._prompt_in_row(request)

    def _has_waiting(self, prompt: tuple[int, ...]) -> bool:
        return any(request.request.prompt_ids == prompt for request in self.waiting)

    def _drop_prompt(self, prompt: tuple[int, ...]) -> None:
        """Drop the copy of a prompt if no other samples of it wait."""
        if prompt in self._prompts and not self._has_waiting(prompt):
            del self._prompts[prompt]

    def shrink_caches(self, nbytes: int) -> None:
        """Shrink the caches, because the rows are about to grow to `nbytes` of the budget."""
        remaining = self.store.budget - nbytes
        while self._prompts and self._prompt_bytes > remaining:
            self._prompts.popitem()
        if self.prefix_cache is not None:
            self.prefix_cache.shrink(remaining - self._prompt_bytes)

    @property
    def _prompt_bytes(self) -> int:
        return sum(prompt.kv.nbytes for prompt in list(self._prompts.values()))

    def drop_caches(self) -> None:
        """Drop the caches and the unfinished chunked prefill, because the weights change."""
        self.partial = None
        self._prompts.clear()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def _next_waiting(self) -> Running:
        """The oldest waiting request. With `stagger`, the oldest of a prompt without running
        samples, if there is one: the response of a finished sample of the same prompt is the best
        source of history drafts."""
        if self._stagger:
            prompts = {r.request.prompt_ids for r in self.running}
            without_running = (r for r in self.waiting if r.request.prompt_ids not in prompts)
            return next(without_running, self.waiting[0])
        return self.waiting[0]

    def make_room(self, weights: int) -> list[Running]:
        """Preempt the newest requests until the next token of every running request fits.

        Called before each decode step. Returns the preempted requests.
        """
        preempted = []
        while self.running:
            lengths = [r.length for r in self.running]
            if self.store.fits(lengths):
                self.store.reserve(lengths)
                break
            newest = max(self.running, key=_arrival)
            preempted.append(newest)
            self.preempt(newest, weights)
        return preempted

    def preempt(self, request: Running, weights: int) -> None:
        """Move a running request back to its place in the queue. Its keys and values are saved
        unless the current weights computed all of them."""
        if request.kv_weights != {weights}:
            kv = self.store.view_prefix(self.row(request), request.length - 1).clone()
            self._saved[request.request_id] = kv
        self._free_row(request)
        insort(self.waiting, request, key=_arrival)

    def unsaved(self) -> list[Running]:
        """Preempted requests whose keys and values are not saved."""
        return [r for r in self.waiting if r.token_ids and r.request_id not in self._saved]

    def save(self, request: Running, kv: KVPrefix) -> None:
        """Save the keys and values of a preempted request until it runs again."""
        self._saved[request.request_id] = kv

    def requeue_all(self) -> None:
        """Move all running requests to the queue, and drop all keys and values, so that all
        contexts are prefilled again (a weight update with `KVPolicy.RECOMPUTE`)."""
        self.waiting = sorted([*self.running, *self.waiting], key=_arrival)
        while self.running:
            last = len(self.running) - 1
            self.store.end(last, last, 0)
            self._on_row_freed(self.running.pop())
        self._saved.clear()

    def remove(self, request: Running) -> None:
        """Remove a request that has ended or was aborted."""
        self._names.remove(request.request_id)
        if request in self.running:
            self._free_row(request)
            return
        self._drop_partial_of(request)
        self.waiting.remove(request)
        self._saved.pop(request.request_id, None)
        self._drop_prompt(request.request.prompt_ids)

    def _free_row(self, request: Running) -> None:
        """Free the row of `request` by moving the last row to it."""
        row, last = self.row(request), len(self.running) - 1
        moved = self.running[last]
        self.store.end(row, last, moved.length - 1)
        self.running[row] = moved
        self.running.pop()
        self._on_row_freed(request)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.running and not self.waiting

    def row(self, request: Running) -> int:
        """The row of a running request."""
        return self.running.index(request)

    def all(self) -> list[Running]:
        """All running and waiting requests."""
        return [*self.running, *self.waiting]


def _arrival(request: Running) -> int:
    return request.arrival
