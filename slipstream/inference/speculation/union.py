"""A draft head and history together: for each request the chain that promises more.

Both are asked; how often each has been right is counted, for history by how much of the context
agrees with what it remembers. What a chain that was not verified would have yielded is seen from
the tokens that came out, so neither needs to be tried in order to be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import Tensor

from slipstream.inference.speculation.acceptance import AcceptanceCurve
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import (
    DraftBatch,
    DraftTree,
    LearningProposer,
)
from slipstream.types import WeightUpdate

_AGREEMENTS = (4, 6, 9, 13)
"""Lower ends of the classes of agreement, in tokens, beyond the first class."""

_AFTER_AN_UPDATE = 0.25
"""What earlier drafts of the head count with its new weights: they mostly do better, and history's
would be taken for too long."""


class UnionProposer:
    """`Proposer` over two."""

    def __init__(self, head: LearningProposer, history: HistoryProposer) -> None:
        self._head = head
        self._history = history
        self._head_curve = AcceptanceCurve()
        self.head_record = (0, 0)
        """How often drafts of the head could be compared with what came out, and how many were
        right, whoever was chosen."""
        # Until it is known better, what agrees in many tokens is trusted more.
        guesses = (0.3, 0.45, 0.6, 0.75, 0.85)
        self._curves = [AcceptanceCurve(guess=guess) for guess in guesses]
        # What each request was offered: by the head, by history, and the class of agreement.
        self._offers: dict[str, tuple[list[int], list[int], int]] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Tapping`."""
        return self._head.taps

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        self._head.begin(request_id, prompt, context, features_TD)
        self._history.begin(request_id, prompt, context)

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """See `Proposer`."""
        trees = self._head.propose(batch, plan)
        chosen = list[DraftTree]()
        for name, tree in zip(batch.request_ids, trees, strict=True):
            mine = list(tree.tokens[1:])
            past, agreement = self._history.suggest(name, plan.steps)
            kind = sum(agreement >= limit for limit in _AGREEMENTS)
            self._offers[name] = (mine, past, kind)
            hopes = self._curves[kind].expected(len(past))
            better = hopes > self._head_curve.expected(len(mine))
            chosen.append(DraftTree.chain(tree.tokens[0], past) if better else tree)
        return chosen

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """See `Proposer`."""
        seen: list[tuple[AcceptanceCurve, list[int], list[int]]] = [
            (curve, [], []) for curve in (*self._curves, self._head_curve)
        ]
        for name, new in zip(request_ids, tokens, strict=True):
            mine, past, kind = self._offers.pop(name, ([], [], 0))
            for drafts, (_, drafted, accepted) in ((past, seen[kind]), (mine, seen[-1])):
                compared, right = _compare(drafts, new)
                if compared:
                    drafted.append(compared)
                    accepted.append(right)
        _, drafted, accepted = seen[-1]
        compared, right = self.head_record
        self.head_record = (compared + len(drafted), right + sum(accepted))
        for curve, drafted, accepted in seen:
            if drafted:
                curve.record(drafted, accepted)
        self._head.observe(request_ids, tokens, features_NWD)
        self._history.observe(request_ids, tokens, features_NWD)

    def update(self, update: WeightUpdate) -> None:
        """See `LearningProposer`. What the head was right in before says less of it now."""
        self._head.update(update)
        self._head_curve.forget(_AFTER_AN_UPDATE)

    def end(self, request_id: str) -> None:
        """See `Proposer`."""
        self._offers.pop(request_id, None)
        self._head.end(request_id)
        self._history.end(request_id)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """See `Proposer`."""
        self._head.remember(prompt, context, known)
        self._history.remember(prompt, context, known)


def _compare(drafts: Sequence[int], truth: Sequence[int]) -> tuple[int, int]:
    """How many drafts can be compared with the tokens that came out, and how many are right up to
    the first that is not."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, truth, strict=False))
    return min(len(drafts), len(truth)), sum(1 for _ in same)
