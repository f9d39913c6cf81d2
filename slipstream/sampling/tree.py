"""Which candidates of draft trees are verified: the most promising ones of all requests together.

A budget of rows for the whole batch goes where it is most likely to be of use: a request whose
drafts promise much has more of them, one whose next token is anybody's guess has none. The drafts
decide nothing but how soon tokens come, so choosing them by what they promise is harmless.

Shapes: N requests, C candidates of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of each request tokens, for each the number of the candidate that it follows (-1: none, else
    an earlier one), and scores: the logarithm of the chance that the policy will choose all tokens
    down to it, as far as the drafter can tell; never more than that of the one before it."""

    tokens_NC: npt.NDArray[np.int64]
    parents_NC: npt.NDArray[np.int64]
    scores_NC: npt.NDArray[np.float64]
    gaps_NW: npt.NDArray[np.float64]
    """By how much the scores of the best tokens of the first level are below the first one's."""

    def best(
        self, drafts: int, least: float = -np.inf
    ) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """The `drafts` best of all requests together, or all that have any chance and a score of
        `least`: of each request tokens, parents, numbered from 1 on, 0 for none, and scores."""
        kept = _largest(self.scores_NC.ravel(), drafts).reshape(self.scores_NC.shape)
        kept &= self.scores_NC >= least
        numbers = kept.cumsum(1)
        for tokens, parents, scores, chosen, number in zip(
            self.tokens_NC, self.parents_NC, self.scores_NC, kept, numbers, strict=True
        ):
            above = np.where(parents[chosen] < 0, 0, number[parents[chosen]])
            yield tokens[chosen].tolist(), above.tolist(), scores[chosen].tolist()


def _largest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.bool_]:
    """Which are the `count` largest finite ones, the first among equals: what follows another may
    be as good, but comes after it."""
    if count <= 0:
        return np.zeros(len(scores), np.bool_)
    if count >= len(scores):
        return scores > -np.inf
    least = np.partition(scores, -count)[-count]
    kept: npt.NDArray[np.bool_] = scores > least
    if least > -np.inf:
        kept[np.flatnonzero(scores == least)[: count - int(kept.sum())]] = True
    return kept


@dataclass(slots=True)
class Branches:
    """A draft tree that grows: node 0 is the last known token, the others have scores."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> Branches:
        """A copy; `scores` of all but the root."""
        return cls([*tokens], [*parents], [0.0, *scores])

    def add(self, path: Sequence[int], scores: Sequence[float]) -> None:
        """Tokens in a row after the root. What is there already, by its tokens, keeps the better
        score of the two."""
        node = 0
        for token, score in zip(path, scores, strict=True):
            child = self._child(node, token)
            if child is None:
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(score)
            self.scores[child] = max(self.scores[child], score)
            node = child

    def _child(self, node: int, token: int) -> int | None:
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None

    def part(self, kept: Sequence[int]) -> Branches:
        """Some of the nodes, in their order, the root among them; parents of all are."""
        number = {node: i for i, node in enumerate(kept)}
        return Branches(
            [self.tokens[node] for node in kept],
            [number.get(self.parents[node], -1) for node in kept],
            [self.scores[node] for node in kept],
        )


def best_branches(
    trees: Sequence[Branches], drafts: int, least: float = -np.inf
) -> list[list[int]]:
    """Of each tree the root and those of the `drafts` best nodes of all trees that are its own,
    none with a score below `least`."""
    # In the order of scores and, among equals, of nodes: parents are never after their children.
    order = sorted(
        (-score, node, i)
        for i, tree in enumerate(trees)
        for node, score in enumerate(tree.scores)
        if node and score >= least
    )
    kept = [[0] for _ in trees]
    for _, node, i in order[: max(drafts, 0)]:
        kept[i].append(node)
    return [sorted(nodes) for nodes in kept]
