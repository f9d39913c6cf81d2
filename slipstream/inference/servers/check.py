"""Tells from log-probs whether a server computes with the newest weights.

This process computes log-probs of one fixed sequence under the weights that it sends. The server
computes them at the contexts and tokens where they differ most from those of the last weights that
were confirmed:

    d = new - old          what the update changes
    r = server - old       what the server shows
    share = r.d / d.d      1: the new weights, 0: the old ones
    error                  the standard error of `share`

Rounding errors in one context are not independent: a context has one hidden state. So `error` is
clustered by context. With u_c = sum of (r - share d) d over the values of context c:

    error = sqrt(C / (C - 1) sum of u_c^2) / d.d

A small update may change less than the rounding of the server. Then nothing can be told, and the
old policy stays the reference: the next update is compared with it, so changes add up.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

CONTEXTS = 16
"""Number of contexts, which are beginnings of the sequence, of evenly spaced lengths."""

TOKENS = 8
"""Number of tokens whose log-probs are compared in each context."""

LENGTH = 320
"""Tokens of the sequence, if the model's context allows. It is longer than two blocks of 128, so
that the server can take its beginning from a cache."""

SIGMAS = 6.0
"""Standard errors between `share` and 1/2 for a decision. With 16 contexts, a server with the new
weights is taken for an old one in less than 1 of 10,000 updates."""

ROUNDING = 4.0
"""How much larger than its median before the difference between server and trainer may be."""

REMEMBERED = 64
"""Number of confirmed differences whose median is taken."""

LARGEST = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest root mean square difference between server and trainer in nats, by dtype."""

Score = Callable[[Mapping[str, Tensor], Sequence[int]], Tensor]
"""Takes the tensors of a policy by name, and T token ids. Returns the log-probs (T, V) of the next
token, float32 on the CPU."""


class Verdict(StrEnum):
    NEW = "new"
    OLD = "old"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a comparison shows. `difference` is the root mean square of server minus trainer in
    nats, `change` that of new minus old policy."""

    verdict: Verdict
    share: float
    error: float
    difference: float
    change: float


def judge(server: Tensor, new: Tensor, old: Tensor, *, rounding: float) -> Finding:
    """Compare log-probs (C, n) of a server, at n tokens in each of C contexts, with those of the
    new and the old policy. `rounding` is the largest difference between server and trainer that
    counts as rounding."""
    d, r = (new - old).double(), (server - old).double()
    change = float(d.square().mean().sqrt())
    difference = float((server - new).double().square().mean().sqrt())
    share, error = math.nan, math.inf
    if change > 0:
        share = float((r * d).sum() / (d * d).sum())
        sums = ((r - share * d) * d).sum(1)
        contexts = len(sums)
        if contexts > 1:
            spread = contexts / (contexts - 1) * float(sums.square().sum())
            error = math.sqrt(spread) / float((d * d).sum())
    if share + SIGMAS * error < 0.5:
        verdict = Verdict.OLD
    elif not difference <= rounding:  # not a number, too
        verdict = Verdict.WRONG
    elif share - SIGMAS * error > 0.5:
        verdict = Verdict.NEW
    else:
        verdict = Verdict.UNDECIDED
    return Finding(verdict=verdict, share=share, error=error, difference=difference, change=change)


@dataclass(frozen=True, slots=True)
class Question:
    """Contexts, as beginnings of a sequence, and the tokens whose log-probs are asked for."""

    contexts: list[list[int]]
    token_ids: list[list[int]]


class WeightCheck:
    """The references of one run, and the decision about each server.

    The weights are scored once per update. Each server has its own reference, because one of them
    may be confirmed and another one not.
    """

    def __init__(
        self,
        score: Score,
        weights: Mapping[str, Tensor],
        *,
        vocab_size: int,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        """`weights` are those that the servers have at the start."""
        generator = torch.Generator().manual_seed(0)
        length = max(2, min(LENGTH, max_model_len - 1))
        self._ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        count = min(CONTEXTS, length)
        self._lengths = [length * (row + 1) // count for row in range(count)]
        self._score = score
        self._largest = LARGEST[dtype]
        self._old: dict[str, Tensor] = {}
        self._differences: dict[str, deque[float]] = {}
        self.renew(weights)

    def renew(self, weights: Mapping[str, Tensor]) -> None:
        """Score the sequence with new weights."""
        rows = [length - 1 for length in self._lengths]
        self._new = self._score(weights, self._ids)[rows].clone()

    def question(self, server: str) -> Question:
        """What to ask the server with this name: the tokens whose log-probs have changed most, or
        at the start the likeliest ones."""
        size = min(TOKENS, self._new.shape[1])
        old = self._old.get(server)
        values = self._new if old is None else (self._new - old).abs()
        tokens = values.topk(size, dim=1).indices
        return Question([self._ids[:length] for length in self._lengths], tokens.tolist())

    def decide(
        self, server: str, question: Question, answers: Sequence[Sequence[float]]
    ) -> Finding:
        """Decide from the log-probs that the server gave for each context and token."""
        ids = torch.tensor(question.token_ids)
        given = torch.tensor(answers, dtype=torch.float32)
        new = self._new.gather(1, ids)
        old = self._old.get(server)
        if old is None:
            difference = float((given - new).double().square().mean().sqrt())
            fits = difference <= self._limit(server)
            finding = Finding(
                verdict=Verdict.NEW if fits else Verdict.WRONG,
                share=math.nan,
                error=math.inf,
                difference=difference,
                change=math.nan,
            )
        else:
            finding = judge(given, new, old.gather(1, ids), rounding=self._limit(server))
        if finding.verdict is Verdict.NEW:
            self._old[server] = self._new
            seen = self._differences.setdefault(server, deque(maxlen=REMEMBERED))
            seen.append(finding.difference)
        return finding

    def _limit(self, server: str) -> float:
        """The largest difference that counts as rounding, in nats. It is a median of those before:
        a single large one does not raise it."""
        seen = self._differences.get(server)
        if not seen:
            return self._largest
        return min(self._largest, max(ROUNDING * statistics.median(seen), 1e-6))

    def forget(self, server: str) -> None:
        """The server was started again: its first answer is compared with the trainer's only."""
        self._old.pop(server, None)
