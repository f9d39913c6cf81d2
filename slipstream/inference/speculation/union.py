"""A draft head and history together: for each request the chain that promises more, or a tree of
what both draft.

Both are asked; how often each has been right is counted, for history by how much of the context
agrees with what it remembers. What a chain that was not verified would have yielded is seen from
the tokens that came out, so neither needs to be tried in order to be judged. In a tree the two are
merged by their tokens, and the most promising nodes of the batch are verified, whosever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from math import log

from torch import Tensor

from slipstream.inference.speculation.acceptance import AcceptanceCurve
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import (
    DraftBatch,
    DraftTree,
    LearningProposer,
)
from slipstream.sampling.tree import GrowingTree, best_nodes
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
        self._offers: dict[str, tuple[DraftTree, list[int], int]] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `UsesAuxLayers`."""
        return self._head.aux_layers

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
        found: list[tuple[list[int], AcceptanceCurve]] = []
        for name, tree in zip(batch.request_ids, trees, strict=True):
            past, agreement = self._history.suggest(name, plan.steps)
            kind = sum(agreement >= limit for limit in _AGREEMENTS)
            self._offers[name] = (tree, past, kind)
            found.append((past, self._curves[kind]))
        if plan.topk > 1:
            return _merged(trees, found, plan, batch)
        return [
            DraftTree.chain(tree.tokens[0], past)
            if curve.expected(len(past)) > self._head_curve.expected(len(tree) - 1)
            else tree
            for tree, (past, curve) in zip(trees, found, strict=True)
        ]

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
            mine, past, kind = self._offers.pop(name, (DraftTree.chain(0, ()), [], 0))
            _note(seen[kind], *_compare(past, new))
            if mine.is_chain:
                _note(seen[-1], *_compare(mine.tokens[1:], new))
            if len(mine) > 1 and new:
                compared, right = self.head_record
                self.head_record = compared + 1, right + _right(mine, new)
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


def _note(curve: tuple[AcceptanceCurve, list[int], list[int]], compared: int, right: int) -> None:
    if compared:
        curve[1].append(compared)
        curve[2].append(right)


def _right(tree: DraftTree, truth: Sequence[int]) -> int:
    """How far down a tree the tokens go that came out."""
    node = depth = 0
    for child in range(1, len(tree)):
        if (
            tree.parents[child] == node
            and depth < len(truth)
            and tree.tokens[child] == truth[depth]
        ):
            node, depth = child, depth + 1
    return depth


def _merged(
    trees: Sequence[DraftTree],
    found: Sequence[tuple[list[int], AcceptanceCurve]],
    plan: DraftPlan,
    batch: DraftBatch,
) -> list[DraftTree]:
    """The best of what heads and history have drafted, as many as `plan` has rows for: for all
    requests together, or where rows are a matrix for each. None with a score below the least."""
    merged = []
    for tree, (past, curve) in zip(trees, found, strict=True):
        scores = tree.scores
        if scores is None:
            # Where it says nothing of itself it drafts nothing, or a chain that is all there is.
            scores = [0.0] * (len(tree) - 1)
        both = GrowingTree.of(tree.tokens, tree.parents, scores)
        chances = [log(max(rate, 1e-9)) for rate in curve.rates(len(past))]
        both.add(past, list(accumulate(chances)))
        merged.append(both)
    drafts, least = plan.verify_tokens - 1, batch.min_log_probability
    if batch.as_matrix:
        chosen = [best_nodes([both], drafts, least)[0] for both in merged]
    else:
        most = plan.most_drafts(len(merged))
        chosen = best_nodes(merged, len(merged) * drafts, least, most=most)
    kept = []
    for tree, both, nodes in zip(trees, merged, chosen, strict=True):
        part = both.part(nodes)
        by_head = sum(0 < node < len(tree) for node in nodes)
        kept.append(DraftTree(part.tokens, part.parents, by_head, part.scores[1:]))
    return kept


def _compare(drafts: Sequence[int], truth: Sequence[int]) -> tuple[int, int]:
    """How many drafts can be compared with the tokens that came out, and how many are right up to
    the first that is not."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, truth, strict=False))
    return min(len(drafts), len(truth)), sum(1 for _ in same)
