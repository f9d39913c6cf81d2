"""Combines a draft head with drafts from history.

Both propose drafts for each request. With a chain plan, the chain with more expected accepted
tokens is verified. Expected acceptance comes from two kinds of measured curves: one for the head,
and one per range of match lengths for history. Both chains are compared with the tokens that the
policy sampled, so a proposer is measured even if its chain was not verified. With a tree plan, both
drafts are merged into one tree, and the nodes with the highest estimated acceptance probability are
verified.

The head drafts for all requests in one call, which takes a share of the step. If the batch would
get more tokens per second from history alone, the head is not asked. It is asked for one token now
and then, because what it would gain may change. A new head, of which nothing is known, also drafts
one token only, until a few of them were compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from math import log
from typing import TypeVar

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

_MATCH_LENGTHS = (4, 6, 9, 13)
"""Match lengths of history, in tokens, at which the next acceptance curve starts to apply."""

_KEPT_ON_UPDATE = 0.25
"""Weight of earlier drafts of the head after a weight update. New weights are mostly better; with
the full weight of the old drafts, history would be preferred for too long."""


T = TypeVar("T")

_ASK_EVERY, _MOST_SKIPPED = 32, 512
"""A head that is too slow is asked again after 32 steps, then after 64, 128 ... at most 512."""

_TRIED = 8
"""Drafts of the head that are compared before it may draft more than one token per request."""

_NEW_SHARE = 0.1
"""Weight of the last step in the measured times."""


@dataclass(slots=True)
class _Seconds:
    """Measured seconds of the head for one draft per request, and of the rest of a step."""

    draft: float
    rest: float


class HeadTime:
    """Measures how long the head drafts and how long the rest of a step takes, by number of
    requests, and decides how many tokens the head drafts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[int, _Seconds] = {}
        # Steps since the head was asked, and steps until it is asked again if it is too slow.
        self._skipped, self._wait = 0, _ASK_EVERY
        # Whether the head has missed tokens since it was asked; the same at the last call.
        self._behind = self._catches_up = False
        # Drafts, requests, start and end of the head's drafting in this step.
        self._now: tuple[int, int, float, float] | None = None

    def drafts(self, most: int, requests: int, compared: float, both: float, alone: float) -> int:
        """The number of tokens that the head drafts for each of the `requests`: `most`, 0 if the
        batch is faster with history alone, or 1 to learn how good the head is.

        `compared`: how many drafts of the head were compared with sampled tokens. The batch is
        expected to get `both` tokens if the head drafts `most`, and `alone` tokens from history
        alone.
        """
        known = self._seconds.get(requests.bit_length())
        if compared >= _TRIED and known is not None:
            if both * known.rest >= alone * (known.rest + most * known.draft):
                self._skipped, self._wait = 0, _ASK_EVERY
                return most
            self._skipped += 1
            if self._skipped < self._wait:
                self._behind = True
                return 0
            # It is asked in two steps: first it processes the tokens that it missed, and the second
            # step is measured.
            if self._skipped > self._wait or not self._behind:
                self._skipped, self._wait = 0, min(2 * self._wait, _MOST_SKIPPED)
        return 1

    def measured(self, drafts: int, requests: int, draft: Callable[[], T]) -> T:
        """Return what `draft` returns, and measure its time."""
        self._catches_up, self._behind = self._behind, False
        started = self._clock()
        result = draft()
        self._now = drafts, requests, started, self._clock()
        return result

    def step_ended(self) -> None:
        """The policy has verified the drafts of this step."""
        if self._now is None:
            return
        drafts, requests, started, drafted = self._now
        self._now = None
        if self._catches_up:
            return
        draft, rest = (drafted - started) / drafts, self._clock() - drafted
        known = self._seconds.setdefault(requests.bit_length(), _Seconds(draft, rest))
        # First calls, such as those that load kernels, take much longer than later ones.
        known.draft += (draft - known.draft) * (1 if draft < known.draft / 2 else _NEW_SHARE)
        known.rest += (rest - known.rest) * (1 if rest < known.rest / 2 else _NEW_SHARE)

    def plain_step(self) -> None:
        """A step without drafts has ended, so the head has missed its tokens."""
        self._behind = True

    def head_changed(self) -> None:
        """Ask the head soon, because it has changed."""
        self._skipped, self._wait = _ASK_EVERY - 1, _ASK_EVERY


class UnionProposer:
    """A `Proposer` that combines a draft head and history."""

    def __init__(
        self, head: LearningProposer, history: HistoryProposer, head_time: HeadTime | None = None
    ) -> None:
        self._head = head
        self._history = history
        self._head_time = head_time or HeadTime()
        self._head_curve = AcceptanceCurve()
        self.head_record = (0, 0)
        """Number of chains and trees of the head that were compared with the sampled tokens, and
        total number of their correct draft tokens. Includes drafts that were not verified."""
        # Prior acceptance rates of history: longer matches are trusted more.
        guesses = (0.3, 0.45, 0.6, 0.75, 0.85)
        self._curves = [AcceptanceCurve(guess=guess) for guess in guesses]
        # By request: the draft of the head, the chain of history, and the index of its curve.
        self._offers: dict[str, tuple[DraftTree, list[int], int]] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The auxiliary layers of the head."""
        return self._head.aux_layers

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """Add a request to both proposers."""
        self._head.begin(request_id, prompt, context, features_TD)
        self._history.begin(request_id, prompt, context)

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """The better chain for each request, or with a tree plan a merged tree."""
        kinds: list[int] = []
        found: list[tuple[list[int], AcceptanceCurve]] = []
        for name in batch.request_ids:
            past, match_length = self._history.suggest(name, plan.steps)
            kinds.append(sum(match_length >= limit for limit in _MATCH_LENGTHS))
            found.append((past, self._curves[kinds[-1]]))
        expected = [curve.expected(len(past)) for past, curve in found]
        trees = self._drafts_of_head(batch, plan, expected)
        for name, tree, (past, _), kind in zip(batch.request_ids, trees, found, kinds, strict=True):
            self._offers[name] = (tree, past, kind)
        if plan.topk > 1:
            return _merged(trees, found, plan, batch)
        return [
            DraftTree.chain(tree.tokens[0], past)
            if accepted > self._head_curve.expected(len(tree) - 1)
            else tree
            for tree, (past, _), accepted in zip(trees, found, expected, strict=True)
        ]

    def _drafts_of_head(
        self, batch: DraftBatch, plan: DraftPlan, expected: Sequence[float]
    ) -> list[DraftTree]:
        """The head's drafts; for a chain plan fewer than planned, or roots alone, if that is
        faster. `expected`: accepted tokens of each request's chain from history."""
        if plan.topk > 1:
            # Trees always ask the head, and take another time than chains.
            return self._head.propose(batch, plan)
        count, most = len(expected), plan.steps
        by_head = self._head_curve.expected(most)
        both = count + sum(max(by_head, accepted) for accepted in expected)
        compared = self._head_curve.compared
        most = self._head_time.drafts(most, count, compared, both, count + sum(expected))
        if not most:
            return batch.chains([()] * count)
        asked = plan if most == plan.steps else DraftPlan.chain(most)
        return self._head_time.measured(most, count, lambda: self._head.propose(batch, asked))

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """Compare both drafts of each request with its new tokens, update the acceptance curves,
        and pass the tokens on to both proposers."""
        # Without drafts there is nothing to compare.
        if self._offers:
            self._head_time.step_ended()
            self._compare_offers(request_ids, tokens)
        else:
            self._head_time.plain_step()
        self._head.observe(request_ids, tokens, features_NWD)
        self._history.observe(request_ids, tokens, features_NWD)

    def _compare_offers(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        counts: list[tuple[AcceptanceCurve, list[int], list[int]]] = [
            (curve, [], []) for curve in (*self._curves, self._head_curve)
        ]
        for name, new in zip(request_ids, tokens, strict=True):
            tree, past, kind = self._offers.pop(name, (DraftTree.chain(0, ()), [], 0))
            _count(counts[kind], *_compare(past, new))
            if tree.is_chain:
                _count(counts[-1], *_compare(tree.tokens[1:], new))
            if len(tree) > 1 and new:
                compared, correct = self.head_record
                self.head_record = compared + 1, correct + _correct_depth(tree, new)
        for curve, drafted, accepted in counts:
            if drafted:
                curve.record(drafted, accepted)

    def update(self, update: WeightUpdate) -> None:
        """Load new weights of the head and reduce the weight of its earlier acceptance. Raises
        EngineError if the update does not fit."""
        self._head.update(update)
        self._head_curve.forget(_KEPT_ON_UPDATE)
        self._head_time.head_changed()

    def policy_changed(self) -> None:
        """Tell the head's proposer that the policy has new weights."""
        self._head.policy_changed()

    def end(self, request_id: str) -> None:
        """Remove a request from both proposers."""
        self._offers.pop(request_id, None)
        self._head.end(request_id)
        self._history.end(request_id)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """Pass tokens of a request without drafts on to both proposers."""
        self._head.remember(prompt, context, known)
        self._history.remember(prompt, context, known)


def _count(
    counts: tuple[AcceptanceCurve, list[int], list[int]], compared: int, correct: int
) -> None:
    if compared:
        counts[1].append(compared)
        counts[2].append(correct)


def _correct_depth(tree: DraftTree, sampled: Sequence[int]) -> int:
    """Number of sampled tokens, from the first on, that a path of the tree matches."""
    node = depth = 0
    for child in range(1, len(tree)):
        if (
            tree.parents[child] == node
            and depth < len(sampled)
            and tree.tokens[child] == sampled[depth]
        ):
            node, depth = child, depth + 1
    return depth


def _merged(
    trees: Sequence[DraftTree],
    found: Sequence[tuple[list[int], AcceptanceCurve]],
    plan: DraftPlan,
    batch: DraftBatch,
) -> list[DraftTree]:
    """For each request, a tree with the best nodes of the head's tree and of the history chain.

    The plan limits the number of draft tokens: for all requests together, or for each request if
    the engine pads requests to the same number of tokens. Nodes below `batch.min_acceptance` are
    left out.
    """
    merged = []
    for tree, (past, curve) in zip(trees, found, strict=True):
        scores = tree.scores
        if scores is None:
            # The head drafted nothing, or a chain without scores, which is kept in full.
            scores = [0.0] * (len(tree) - 1)
        both = GrowingTree.of(tree.tokens, tree.parents, scores)
        log_rates = [log(max(rate, 1e-9)) for rate in curve.rates(len(past))]
        both.add(past, list(accumulate(log_rates)))
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
        # Below drafts of the history, the head's next draft is unknown.
        of_head = len(both.tokens) == len(tree)
        left_out = both.next_left_out(nodes, tree.left_out) if of_head else None
        kept.append(DraftTree(part.tokens, part.parents, by_head, part.scores[1:], left_out))
    return kept


def _compare(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, int]:
    """Number of drafts of a chain that have a sampled token at their position, and number of
    correct drafts before the first wrong one."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False))
    return min(len(drafts), len(sampled)), sum(1 for _ in same)
