"""Drafts from earlier text, without a draft model.

The last tokens of a request are looked up in its own context (prompt and response so far), and in
other responses to the same prompt: those of its group, which run beside it or have finished, and
those of earlier epochs. The tokens that followed there are proposed. Responses to one prompt often
repeat the numbers of the problem, the steps of a search or the form of the answer. Sources: prompt
lookup decoding (Saxena 2023), suffix decoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree

_CANDIDATES = 8
"""Most places that an index keeps per n-gram; the oldest ones are dropped."""


@dataclass(slots=True)
class _Index:
    """Maps each n-gram of `length` tokens to the latest places where it ends, as (text, end)."""

    length: int
    places: dict[tuple[int, ...], list[tuple[list[int], int]]] = field(default_factory=dict)

    def add(self, text: list[int], start: int, end: int) -> None:
        """Index the n-grams of `text` that end in [start, end)."""
        for stop in range(max(start, self.length), end):
            found = self.places.setdefault(tuple(text[stop - self.length : stop]), [])
            found.append((text, stop))
            if len(found) > _CANDIDATES:
                del found[0]

    def remove(self, text: list[int], start: int = 0) -> None:
        """Remove all places in `text` that end at `start` or later."""
        for stop in range(max(start, self.length), len(text)):
            gram = tuple(text[stop - self.length : stop])
            left = [place for place in self.places.get(gram, ()) if place[0] is not text]
            if left:
                self.places[gram] = left
            else:
                self.places.pop(gram, None)

    def find(self, context: list[int]) -> list[tuple[list[int], int]]:
        """The places of the last n-gram of `context`."""
        return self.places.get(tuple(context[-self.length :]), [])


@dataclass(slots=True)
class _Beside:
    """The running responses to one prompt."""

    index: _Index
    requests: int = 0


@dataclass(slots=True)
class _Running:
    """A running request. Tokens of `context` from `new` on were generated since it started to run.
    `own` indexes the first `indexed` tokens of `context`; those after the prompt are also in the
    index `beside` of all running requests of its prompt."""

    prompt: tuple[int, ...]
    context: list[int]
    own: _Index
    new: int
    beside: _Beside
    indexed: int = 0


@dataclass(slots=True)
class _Past:
    """Finished responses to one prompt."""

    index: _Index
    texts: int = 0


class HistoryProposer:
    """A `Proposer` that looks up n-grams in earlier text."""

    def __init__(
        self, *, match: int = 3, longest_match: int = 16, max_tokens: int = 1 << 20
    ) -> None:
        """A place matches if its last `match` tokens equal those of the request. Of several places,
        the one with the longest match counts, up to `longest_match` tokens; of equal ones the one
        with the most tokens after it, then the latest. Finished responses are kept up to
        `max_tokens` tokens in all; the oldest ones are dropped first."""
        self._match = match
        self._longest = longest_match
        self._max_tokens = max_tokens
        self._running: dict[str, _Running] = {}
        self._past: dict[tuple[int, ...], _Past] = {}
        self._beside: dict[tuple[int, ...], _Beside] = {}
        self._texts: deque[tuple[tuple[int, ...], list[int]]] = deque()
        self._kept = 0

    @property
    def kept_tokens(self) -> int:
        """Number of tokens of finished responses in memory."""
        return self._kept

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None = None,
    ) -> None:
        """Add a request. Features are not used."""
        key = tuple(prompt)
        beside = self._beside.setdefault(key, _Beside(_Index(self._match)))
        beside.requests += 1
        index = _Index(self._match)
        self._running[request_id] = _Running(key, list(context), index, len(context), beside)

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """A chain of at most `plan.steps` tokens for each request."""
        return batch.chains([self.drafts(name, plan.steps) for name in batch.request_ids])

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None = None,
    ) -> None:
        """Append the new tokens to the contexts."""
        for request_id, new in zip(request_ids, tokens, strict=True):
            self._running[request_id].context.extend(new)

    def end(self, request_id: str) -> None:
        """Remove a request and remember its new tokens for other requests of the same prompt. If
        the request was interrupted and continues later, each part is remembered once."""
        ended = self._running.pop(request_id, None)
        if ended is not None:
            ended.beside.index.remove(ended.context, len(ended.prompt))
            ended.beside.requests -= 1
            if not ended.beside.requests:
                del self._beside[ended.prompt]
            self.remember(ended.prompt, ended.context, ended.new)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """Remember `context[known:]` for later requests of the same prompt."""
        if known == len(context):
            return
        key = tuple(prompt)
        past = self._past.setdefault(key, _Past(_Index(self._match)))
        # Include the tokens before it, as many as a match can count.
        text = list(context[max(0, known - self._longest) :])
        past.index.add(text, len(text) - (len(context) - known), len(text))
        past.texts += 1
        self._texts.append((key, text))
        self._kept += len(text)
        while self._kept > self._max_tokens:
            self._forget_oldest()

    def forget(self) -> None:
        """Drop all finished responses."""
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
        """Propose at most `count` tokens for one running request; none without a match."""
        return self.suggest(request_id, count)[0]

    def suggest(self, request_id: str, count: int) -> tuple[list[int], int]:
        """At most `count` proposed tokens, and the length of the match before them."""
        request = self._running[request_id]
        context = request.context
        # Exclude the end of the context, because it would match itself.
        request.own.add(context, request.indexed, len(context))
        first = max(request.indexed, len(request.prompt))
        request.beside.index.add(context, first, len(context))
        request.indexed = len(context)
        past = self._past.get(request.prompt)
        beside = request.beside.index.find(context)
        places = past.index.find(context) if past else []
        places = [*places, *(place for place in beside if place[0] is not context)]
        best, drafts = 0, list[int]()
        for text, end in (*places, *request.own.find(context)):
            length, found = self._match_length(context, text, end), text[end : end + count]
            # A running response may end with the match, so nothing follows.
            if found and (length, len(found)) >= (best, len(drafts)):
                best, drafts = length, found
        return drafts, best

    def _match_length(self, context: list[int], text: list[int], end: int) -> int:
        """Number of equal tokens at the end of `context` and before `end` in `text`."""
        count = 0
        limit = min(self._longest, end, len(context))
        while count < limit and context[-1 - count] == text[end - 1 - count]:
            count += 1
        return count
