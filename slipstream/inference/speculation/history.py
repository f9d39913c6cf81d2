"""Drafts from what has been written before: no training, useful from the first step.

A request's last tokens are looked up in its own context, in finished responses to the same prompt
(its siblings, and those of earlier epochs), and what followed there is proposed. Reasoning repeats
itself: the numbers of a problem, the steps of a search, the form of an answer. The idea is that of
prompt look-up decoding (Saxena 2023) and of suffix decoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree

_CANDIDATES = 8
"""Places of one n-gram that are remembered per text or prompt, the latest ones."""


@dataclass(slots=True)
class _Index:
    """Where n-grams end: n-gram -> the latest (text, end) pairs."""

    length: int
    places: dict[tuple[int, ...], list[tuple[list[int], int]]] = field(default_factory=dict)

    def add(self, text: list[int], start: int, end: int) -> None:
        """Index the n-grams of `text` that end in [start, end)."""
        for stop in range(max(start, self.length), end):
            found = self.places.setdefault(tuple(text[stop - self.length : stop]), [])
            found.append((text, stop))
            if len(found) > _CANDIDATES:
                del found[0]

    def remove(self, text: list[int]) -> None:
        """Forget all places in `text`."""
        for stop in range(self.length, len(text)):
            gram = tuple(text[stop - self.length : stop])
            left = [place for place in self.places.get(gram, ()) if place[0] is not text]
            if left:
                self.places[gram] = left
            else:
                self.places.pop(gram, None)

    def find(self, context: list[int]) -> list[tuple[list[int], int]]:
        """Places of the last n-gram of `context`."""
        return self.places.get(tuple(context[-self.length :]), [])


@dataclass(slots=True)
class _Running:
    """`new` is where what this request has written since it began to run starts; `indexed` is how
    far its own index goes."""

    prompt: tuple[int, ...]
    context: list[int]
    own: _Index
    new: int
    indexed: int = 0


@dataclass(slots=True)
class _Past:
    """Finished responses to one prompt."""

    index: _Index
    texts: int = 0


class HistoryProposer:
    """`Proposer` by n-gram look-up. Memory is bounded; the oldest texts go first."""

    def __init__(
        self, *, match: int = 3, longest_match: int = 16, max_tokens: int = 1 << 20
    ) -> None:
        """`match` tokens must agree at least; among several places the one that agrees in most
        tokens is taken, counted up to `longest_match`, and the latest among equals. `max_tokens`
        bounds what is kept of finished responses."""
        self._match = match
        self._longest = longest_match
        self._max_tokens = max_tokens
        self._running: dict[str, _Running] = {}
        self._past: dict[tuple[int, ...], _Past] = {}
        self._texts: deque[tuple[tuple[int, ...], list[int]]] = deque()
        self._kept = 0

    @property
    def kept_tokens(self) -> int:
        """Tokens of finished responses that are remembered."""
        return self._kept

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None = None,
    ) -> None:
        """See `Proposer`."""
        index = _Index(self._match)
        self._running[request_id] = _Running(tuple(prompt), list(context), index, len(context))

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """See `Proposer`."""
        return batch.chains([self.drafts(name, plan.steps) for name in batch.request_ids])

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None = None,
    ) -> None:
        """See `Proposer`."""
        for request_id, new in zip(request_ids, tokens, strict=True):
            self._running[request_id].context.extend(new)

    def end(self, request_id: str) -> None:
        """Remember what the request has written for others of its prompt. One that was interrupted
        and goes on is remembered piece by piece."""
        ended = self._running.pop(request_id, None)
        if ended is not None:
            self.remember(ended.prompt, ended.context, ended.new)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """See `Proposer`."""
        if known == len(context):
            return
        key = tuple(prompt)
        past = self._past.setdefault(key, _Past(_Index(self._match)))
        # With what comes before it as far as agreement is counted.
        text = list(context[max(0, known - self._longest) :])
        past.index.add(text, len(text) - (len(context) - known), len(text))
        past.texts += 1
        self._texts.append((key, text))
        self._kept += len(text)
        while self._kept > self._max_tokens:
            self._forget_oldest()

    def forget(self) -> None:
        """Forget all finished responses."""
        self._past.clear()
        self._texts.clear()
        self._kept = 0

    def _forget_oldest(self) -> None:
        key, text = self._texts.popleft()
        past = self._past[key]
        past.index.remove(text)
        past.texts -= 1
        if not past.texts:
            del self._past[key]
        self._kept -= len(text)

    def drafts(self, request_id: str, count: int) -> list[int]:
        """At most `count` tokens for one running request."""
        return self.suggest(request_id, count)[0]

    def suggest(self, request_id: str, count: int) -> tuple[list[int], int]:
        """`drafts`, and how many tokens before them agree."""
        request = self._running[request_id]
        context = request.context
        # The n-gram that ends the context must not find itself.
        request.own.add(context, request.indexed, len(context))
        request.indexed = len(context)
        past = self._past.get(request.prompt)
        places = [*(past.index.find(context) if past else []), *request.own.find(context)]
        best, drafts = 0, list[int]()
        for text, end in places:
            agree = self._agreement(context, text, end)
            if agree >= best:
                best, drafts = agree, text[end : end + count]
        return drafts, best

    def _agreement(self, context: list[int], text: list[int], end: int) -> int:
        count = 0
        limit = min(self._longest, end, len(context))
        while count < limit and context[-1 - count] == text[end - 1 - count]:
            count += 1
        return count
