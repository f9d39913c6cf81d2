"""Who runs, who waits, who is set aside. Pure bookkeeping: no tensors are computed here.

Requests run in rows 0 .. n-1 of the KV store. They are served in order of arrival: when memory runs
short the newest one gives up its row, so the oldest always goes on. Its keys and values are
recomputed later if the weights are still those that computed them, and set aside otherwise:
recomputing under new weights would change the sample. What is set aside is not part of the budget,
nor is the one long context that is being prefilled in pieces, until it takes its row.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.inference.engine.kv_cache import KVPrefix, KVStore
from slipstream.inference.engine.prefix_cache import BLOCK, PrefixCache
from slipstream.inference.engine.request import Running
from slipstream.models.numerics import ROW_MULTIPLE, round_up


@dataclass(frozen=True, slots=True)
class Head:
    """The first tokens of a context, whose keys and values are at hand."""

    kv: KVPrefix
    features: list[Tensor]
    """Hidden states of the last of them, as far as they are known, in pieces (T, D)."""
    reused: int
    """How many of them were taken over from other requests."""

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def has_all_features(self) -> bool:
        return sum(map(len, self.features)) == self.length

    def first(self, count: int) -> Head:
        """Of all but the last tokens."""
        less = self.length - count
        features = [piece[: len(piece) - less] for piece in self.features]
        return Head(self.kv.first(count), features, count)


@dataclass(slots=True)
class Partial:
    """A long context on its way: `done` tokens of it lie in row 0 of a store of its own."""

    request: Running
    store: KVStore
    done: int = 0
    features: list[Tensor] = field(default_factory=list)
    reused: int = 0

    def head(self) -> Head:
        """What is there so far."""
        return Head(self.store.look(0, self.done), self.features, self.reused)


@dataclass(frozen=True, slots=True)
class Admission:
    """Who has taken a row, or else the `long` one whose context has to be prefilled in part first.

    `heads` has what is known of each distinct context of `fresh`.
    """

    fresh: list[Running] = field(default_factory=list)
    restored: list[Running] = field(default_factory=list)
    heads: dict[tuple[int, ...], Head | None] = field(default_factory=dict)
    long: Running | None = None


class Scheduler:
    """Dense rows, a queue in order of arrival, and preemption of the newest."""

    def __init__(
        self,
        store: KVStore,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        left: Callable[[Running], None],
        prefixes: PrefixCache | None = None,
        stagger: bool = False,
    ) -> None:
        """`left` is called for each request that has given up its row, for whatever reason. With
        `stagger` a sample waits, while others can use the row, until none of its prompt runs."""
        self.store = store
        self.prefixes = prefixes
        self.partial: Partial | None = None
        self._left = left
        self._stagger = stagger
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._saved: dict[str, KVPrefix] = {}
        self._prompts: dict[tuple[int, ...], Head] = {}
        self._names: set[str] = set()
        self._arrivals = 0
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, wherever they are. Asked for from other threads, too, while
        steps are under way: hence the copies."""
        under_way = self.partial
        partial = 0 if under_way is None else under_way.store.nbytes
        kept = 0 if self.prefixes is None else self.prefixes.nbytes
        saved = sum(saved.nbytes for saved in list(self._saved.values()))
        return self.store.nbytes + partial + kept + saved + self._prompt_bytes

    def add(self, request: Running) -> None:
        """Queue a new request behind all others."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._names.add(request.request_id)
        self.waiting.append(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._names

    def admit(self, weights: int) -> Admission:
        """Move waiting requests into free rows: some to prefill, some from set-aside memory.

        Bounded by the row limit, by memory, and per call by padded prefill tokens; requests with
        equal context count once, since they share a prefill. What `weights` have computed of a
        prompt for one request is taken over for its other samples.
        """
        done = Admission()
        settled = list(self.running)
        longest = max((r.length for r in self.running), default=0)
        widest = 0
        while self.waiting and len(self.running) < self._max_num_seqs:
            candidate = self._next()
            # One more slot: the token that is sampled next will be cached in the step after.
            needed = max(longest, candidate.length + 1)
            if not self.store.fits(len(self.running) + 1, needed):
                break
            saved, context = candidate.request_id in self._saved, tuple(candidate.context)
            if not saved and candidate.wants_context:
                shared = done.heads.get(context)
                if shared is not None and not shared.has_all_features:
                    break  # It cannot share this prefill, which lacks what it wants.
            if not saved and context not in done.heads:
                head = self._head(candidate, settled, weights)
                rest = candidate.length - (0 if head is None else head.length)
                width = max(widest, round_up(rest, ROW_MULTIPLE))
                if (len(done.heads) + 1) * width > self._max_prefill_tokens:
                    if not done.fresh and not done.restored:
                        return Admission(long=candidate)
                    break
                done.heads[context], widest = head, width
            self.waiting.remove(candidate)
            self.running.append(candidate)
            self._drop_partial_of(candidate)
            self._drop_prompt(candidate.request.prompt_ids)
            (done.restored if saved else done.fresh).append(candidate)
            longest = needed
        if done.fresh or done.restored:
            self.store.reserve(len(self.running), longest)
        for request in done.restored:
            self.store.put(self.row(request), self._saved.pop(request.request_id))
        return done

    def _head(self, request: Running, settled: Sequence[Running], weights: int) -> Head | None:
        if self.partial is not None and self.partial.request is request:
            return self.partial.head()
        prompt = self._prompt_of(request, settled, weights)
        if request.wants_context:
            # Keys and values alone do not tell the hidden states that they were made from.
            return prompt if prompt is not None and prompt.has_all_features else None
        kv = None if self.prefixes is None else self.prefixes.find(request.context)
        if prompt is not None and (kv is None or prompt.length >= kv.length):
            return prompt
        return None if kv is None else Head(kv, [], kv.length)

    def _prompt_of(self, request: Running, settled: Sequence[Running], weights: int) -> Head | None:
        """What there is of its prompt in the rows of other samples, or was left by one."""
        prompt = request.request.prompt_ids
        count = min(len(prompt), request.length - 1)
        if count < BLOCK:
            return None
        left = self._prompts.get(prompt)
        if left is not None:
            return left.first(count)
        for other in settled:
            if other.kv_weights == {weights} and other.request.prompt_ids == prompt:
                return self._prompt_in_row(other).first(count)
        return None

    def _prompt_in_row(self, request: Running) -> Head:
        count = len(request.request.prompt_ids)
        kv = self.store.take(self.row(request), count)
        return Head(kv, request.prompt_features, count)

    def begin_partial(self, request: Running, store: KVStore, weights: int) -> Partial:
        """Prefill the context of `request` in pieces; one that was under way begins anew later."""
        head = self._head(request, self.running, weights)
        store.reserve(1, request.length)
        self.partial = Partial(request, store)
        if head is not None:
            store.put(0, head.kv)
            self.partial = Partial(request, store, head.length, head.features, head.reused)
        return self.partial

    def _drop_partial_of(self, request: Running) -> None:
        if self.partial is not None and self.partial.request is request:
            self.partial = None

    def keep(self, request: Running, weights: int) -> None:
        """Of a request that ends: keep its keys and values for contexts that begin as its own."""
        if request not in self.running or request.kv_weights != {weights}:
            return
        self._keep_prompt(request)
        if self.prefixes is None:
            return
        count = request.length - 1
        taken = self.store.nbytes + self._prompt_bytes + self.store.kept_size(count)
        free = self.store.budget - taken
        if free >= 0:
            self.prefixes.shrink(free)
            self.prefixes.add(request.context[:count], self.store.take(self.row(request), count))

    def _keep_prompt(self, request: Running) -> None:
        """For samples that wait, staggered, until none of their prompt runs."""
        prompt = request.request.prompt_ids
        if not self._stagger or len(prompt) < BLOCK or not self._waits(prompt):
            return
        if self.kv_bytes + self.store.kept_size(len(prompt)) <= self.store.budget:
            self._prompts[prompt] = self._prompt_in_row(request)

    def _waits(self, prompt: tuple[int, ...]) -> bool:
        return any(request.request.prompt_ids == prompt for request in self.waiting)

    def _drop_prompt(self, prompt: tuple[int, ...]) -> None:
        """Unless there are others to come."""
        if prompt in self._prompts and not self._waits(prompt):
            del self._prompts[prompt]

    def make_way(self, nbytes: int) -> None:
        """The rows are about to take so many bytes: what is kept beside them has what is left."""
        left = self.store.budget - nbytes
        while self._prompts and self._prompt_bytes > left:
            self._prompts.popitem()
        if self.prefixes is not None:
            self.prefixes.shrink(left - self._prompt_bytes)

    @property
    def _prompt_bytes(self) -> int:
        return sum(head.kv.nbytes for head in list(self._prompts.values()))

    def drop_heads(self) -> None:
        """Forget keys and values of contexts that have not begun to generate: new weights come."""
        self.partial = None
        self._prompts.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def _next(self) -> Running:
        """Whose turn it is: the oldest or, staggered, the oldest without a running sibling. What a
        sibling wrote is the best history there is, and it is there only when that one has ended."""
        if self._stagger:
            prompts = {r.request.prompt_ids for r in self.running}
            alone = (r for r in self.waiting if r.request.prompt_ids not in prompts)
            return next(alone, self.waiting[0])
        return self.waiting[0]

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
        self._free_row(request)
        insort(self.waiting, request, key=_arrival)

    def unsaved(self) -> list[Running]:
        """Preempted requests whose keys and values are nowhere: to be recomputed or set aside."""
        return [r for r in self.waiting if r.token_ids and r.request_id not in self._saved]

    def set_aside(self, request: Running, saved: KVPrefix) -> None:
        """Keep the keys and values of a waiting request until it runs again."""
        self._saved[request.request_id] = saved

    def forget_kv(self) -> None:
        """Send every running request back to be prefilled again (weight update, recompute)."""
        self.waiting = sorted([*self.running, *self.waiting], key=_arrival)
        while self.running:
            self._left(self.running.pop())
        self._saved.clear()

    def remove(self, request: Running) -> None:
        """Forget a request that has ended or is given up."""
        self._names.remove(request.request_id)
        if request in self.running:
            self._free_row(request)
            return
        self._drop_partial_of(request)
        self.waiting.remove(request)
        self._saved.pop(request.request_id, None)
        self._drop_prompt(request.request.prompt_ids)

    def _free_row(self, request: Running) -> None:
        """The last row moves into that of `request`."""
        row, last = self.row(request), len(self.running) - 1
        if row != last:
            moved = self.running[last]
            self.store.move(last, row, moved.length - 1)
            self.running[row] = moved
        self.running.pop()
        self._left(request)

    @property
    def idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not self.running and not self.waiting

    def row(self, request: Running) -> int:
        """Where a running request's keys and values are."""
        return self.running.index(request)

    def all(self) -> list[Running]:
        return [*self.running, *self.waiting]


def _arrival(request: Running) -> int:
    return request.arrival
