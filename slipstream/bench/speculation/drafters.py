"""Draft proposers for benchmarks: a wrapper that counts, and oracles with a given error rate.

Used by `lossless.check`, `speculation.rollout` and `tree_bound`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from torch import Tensor

from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import (
    DraftBatch,
    DraftTree,
    LearningProposer,
    Proposer,
    aux_layers_of,
)
from slipstream.types import GenerateRequest


class LyingOracle:
    """A proposer that knows the responses, and drafts a wrong token at a given rate.

    It tests verification. If a response differs from the known one, for example after a weight
    update, its drafts are wrong.
    """

    def __init__(
        self,
        known: Mapping[str, Sequence[int]],
        *,
        vocab_size: int,
        lies: float,
        seed: int = 0,
        ragged: bool = False,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        """`known` are the responses by request id. Each draft is wrong with probability `lies`.
        With `ragged`, chains have random lengths up to the planned one. In a tree, the correct
        drafts are at random places among wrong ones. The engine passes the features of `aux_layers`
        (`UsesAuxLayers`), as it does for a head."""
        self.aux_layers = aux_layers
        self._known = known
        self._ragged = ragged
        self._vocab_size = vocab_size
        self._lies = lies
        self._rng = Random(seed)
        self._done: dict[str, int] = {}

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """A request starts."""
        self._done[request_id] = len(context) - len(prompt)

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """Draft for each request of the batch."""
        if plan.topk > 1:
            pairs = zip(batch.request_ids, batch.last, strict=True)
            return [self._tree(name, last, plan) for name, last in pairs]
        drafts = []
        for name in batch.request_ids:
            start = self._done[name]
            count = self._rng.randrange(plan.steps + 1) if self._ragged else plan.steps
            right = self._known[name][start : start + count]
            drafts.append(with_errors(right, self._rng, self._lies, self._vocab_size))
        return batch.chains(drafts)

    def _tree(self, name: str, last: int, plan: DraftPlan) -> DraftTree:
        """A tree with children for a correct node of each level, and for one wrong node."""
        rng, size = self._rng, self._vocab_size
        known = self._known[name][self._done[name] :]
        tokens, parents = [last], [-1]
        level: list[tuple[int, bool]] = [(0, True)]
        for depth in range(min(plan.steps, len(known))):
            below: list[tuple[int, bool]] = []
            for node, right in level:
                wrong = [t for t in rng.sample(range(size), min(plan.topk + 1, size))]
                wrong = [t for t in wrong if t != known[depth]][: plan.topk]
                correct = right and rng.random() >= self._lies
                if correct and wrong:
                    wrong[rng.randrange(len(wrong))] = known[depth]
                for token in wrong[: plan.verify_tokens - len(tokens)]:
                    below.append((len(tokens), correct and token == known[depth]))
                    tokens.append(token)
                    parents.append(node)
            # The correct node and one wrong node, in the order in which they were added.
            others = [node for node in below if not node[1]]
            kept = rng.sample(others, min(1, len(others)))
            level = sorted(kept + [node for node in below if node[1]])
        return DraftTree(tokens, parents)

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """Requests got new tokens."""
        for name, new in zip(request_ids, tokens, strict=True):
            self._done[name] += len(new)

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._done.pop(request_id, None)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """Does nothing: all responses are known."""


class OracleHead:
    """A head whose drafts are all accepted: it drafts, then an oracle replaces its drafts.

    So drafting takes the head's time.
    """

    def __init__(self, head: Proposer, oracle: Proposer) -> None:
        """The drafts of `head` are replaced by those of `oracle`."""
        self._head = head
        self._oracle = oracle
        self.aux_layers = aux_layers_of(head)
        self.remember = head.remember

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """A request starts."""
        self._head.begin(request_id, prompt, context, features_TD)
        self._oracle.begin(request_id, prompt, context, features_TD)

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """Draft for each request of the batch."""
        self._head.propose(batch, plan)
        return self._oracle.propose(batch, plan)

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """Requests got new tokens."""
        self._head.observe(request_ids, tokens, features_NWD)
        self._oracle.observe(request_ids, tokens, features_NWD)

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._head.end(request_id)
        self._oracle.end(request_id)


class CountingProposer:
    """A proposer that counts its verifications, including those without any draft token."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.aux_layers = aux_layers_of(proposer)
        self.begin = proposer.begin
        self.observe = proposer.observe
        self.end = proposer.end
        self.remember = proposer.remember
        self.verifications = 0

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """Draft for each request of the batch."""
        trees = self._proposer.propose(batch, plan)
        self.verifications += len(trees)
        return trees


class CountingLearner(CountingProposer):
    """A `CountingProposer` of a `LearningProposer`."""

    def __init__(self, proposer: LearningProposer) -> None:
        super().__init__(proposer)
        self.policy_changed = proposer.policy_changed
        self.update = proposer.update


def counting(proposer: Proposer) -> CountingProposer:
    """Count the verifications of a proposer."""
    if isinstance(proposer, LearningProposer):
        return CountingLearner(proposer)
    return CountingProposer(proposer)


def history_of(
    requests: Sequence[GenerateRequest],
    known: Mapping[str, Sequence[int]],
    *,
    vocab_size: int,
    lies: float,
    seed: int = 0,
) -> HistoryProposer:
    """A history with the `known` responses to `requests`, in which a share `lies` of the tokens is
    replaced: earlier responses that agree with the present ones for some tokens."""
    history, rng = HistoryProposer(), Random(seed)
    for request in requests:
        name = f"past {request.request_id}"
        history.begin(name, request.prompt_ids, request.prompt_ids)
        history.observe([name], [with_errors(known[request.request_id], rng, lies, vocab_size)])
        history.end(name)
    return history


def with_errors(tokens: Sequence[int], rng: Random, lies: float, vocab_size: int) -> list[int]:
    """`tokens`, each replaced by the next id of the vocabulary with probability `lies`."""
    return [(token + (rng.random() < lies)) % vocab_size for token in tokens]
