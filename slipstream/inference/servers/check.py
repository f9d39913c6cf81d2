"""Tells from log-probs whether a server computes with the newest weights.

The trainer computes log-probs of one fixed sequence under the new policy. The server computes them
at the contexts and tokens where the new policy differs most from the last one that was confirmed:

    d = new - old          what the update changes
    r = server - old       what the server shows
    share = r.d / d.d      1: the new weights, 0: the old ones
    error = |r - share d| / |d|     (over the values: standard error of `share`)

A small update may change less than the rounding of the server. Then nothing can be told, and the
old policy stays the reference: the next update is compared with it, so changes add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

CONTEXTS = 8
"""Number of contexts, which are the beginnings of the sequence."""

TOKENS = 16
"""Number of tokens whose log-probs are compared in each context."""

LENGTH = 320
"""Tokens of the sequence, if the model's context allows. It is longer than two blocks of 128, so
that the server can take its beginning from a cache."""

SIGMAS = 5.0
"""Standard errors between `share` and 1/2 for a decision."""

ROUNDING = 4.0
"""How much larger than before the difference between server and trainer may become."""

LARGEST = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest root mean square difference between server and trainer in nats, by dtype."""

Score = Callable[[Sequence[int]], Tensor]
"""Takes T token ids, and returns the log-probs (T, V) of the next token under the trainer's policy,
float32 on the CPU."""


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
    """Compare log-probs (n,) of a server with those of the new and the old policy. `rounding` is
    the largest difference between server and trainer that counts as rounding."""
    d, r = (new - old).double(), (server - old).double()
    change = float(d.square().mean().sqrt())
    difference = float((server - new).double().square().mean().sqrt())
    share, error = math.nan, math.inf
    if change > 0:
        share = float((r * d).sum() / (d * d).sum())
        error = float((r - share * d).norm() / d.norm() / math.sqrt(max(1, len(d) - 1)))
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

    The trainer's policy is scored once per update. Each server has its own reference, because one
    of them may be confirmed and another one not.
    """

    def __init__(self, score: Score, *, vocab_size: int, max_model_len: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        length = max(2, min(LENGTH, max_model_len - 1))
        self._ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        self._score = score
        self._largest = LARGEST[dtype]
        self._new = self._rows()
        self._old: dict[str, Tensor] = {}
        self._rounding: dict[str, float] = {}

    def _rows(self) -> Tensor:
        """(C, V): the trainer's log-probs at the contexts, from the shortest to the longest."""
        count = min(CONTEXTS, len(self._ids))
        return self._score(self._ids)[-count:].clone()

    def renew(self) -> None:
        """Score the sequence with the trainer's new weights."""
        self._new = self._rows()

    def question(self, server: str) -> Question:
        """What to ask the server with this name: the tokens whose log-probs have changed most, or
        at the start the likeliest ones."""
        size = min(TOKENS, self._new.shape[1])
        old = self._old.get(server)
        values = self._new if old is None else (self._new - old).abs()
        tokens = values.topk(size, dim=1).indices
        first = len(self._ids) - len(self._new) + 1
        contexts = [self._ids[: first + row] for row in range(len(self._new))]
        return Question(contexts, tokens.tolist())

    def decide(
        self, server: str, question: Question, answers: Sequence[Sequence[float]]
    ) -> Finding:
        """Decide from the log-probs that the server gave for each context and token."""
        ids = torch.tensor(question.token_ids)
        given = torch.tensor(answers, dtype=torch.float32).flatten()
        new = self._new.gather(1, ids).flatten()
        old = self._old.get(server)
        if old is None:
            difference = float((given - new).double().square().mean().sqrt())
            fits = difference <= self._largest
            finding = Finding(
                verdict=Verdict.NEW if fits else Verdict.WRONG,
                share=math.nan,
                error=math.inf,
                difference=difference,
                change=math.nan,
            )
        else:
            rounding = min(self._largest, max(ROUNDING * self._rounding[server], 1e-6))
            finding = judge(given, new, old.gather(1, ids).flatten(), rounding=rounding)
        if finding.verdict is Verdict.NEW:
            self._old[server] = self._new
            seen = max(finding.difference, self._rounding.get(server, 0.0))
            self._rounding[server] = seen
        return finding

    def forget(self, server: str) -> None:
        """The server was started again: its first answer is compared with the trainer's only."""
        self._old.pop(server, None)
