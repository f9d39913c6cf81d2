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

from slipstream.kernels.draft.select_nodes import select_nodes


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

    def best_of_each(
        self, drafts: int, least: float = -np.inf
    ) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """The `drafts` best of each request: for where rows are filled up to a matrix, as wide as
        the widest, and cost the same whether they are used or not. Otherwise as `best`."""
        for n in range(len(self.scores_NC)):
            row = slice(n, n + 1)
            one = Candidates(
                self.tokens_NC[row], self.parents_NC[row], self.scores_NC[row], self.gaps_NW[row]
            )
            yield from one.best(drafts, least)

    def best(
        self, drafts: int, least: float = -np.inf
    ) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """The `drafts` best of all requests together, or all that have any chance and a score of
        `least`: of each request tokens, parents, numbered from 1 on, 0 for none, and scores. A
        node's best child comes right after it."""
        N, C = self.scores_NC.shape
        size = max(min(drafts, N * C), 1)
        tokens, parents, counts = (np.empty(n, np.int64) for n in (size, size, N))
        scores = np.empty(size)
        given = [np.ascontiguousarray(x) for x in (self.tokens_NC, self.parents_NC, self.scores_NC)]
        out = (array.ctypes.data for array in (tokens, parents, scores, counts))
        count = select_nodes(*(array.ctypes.data for array in given), N, C, drafts, least, *out)
        del given  # until here
        lists = tokens[:count].tolist(), parents[:count].tolist(), scores[:count].tolist()
        begin = 0
        for end in counts.cumsum().tolist():
            yield lists[0][begin:end], lists[1][begin:end], lists[2][begin:end]
            begin = end


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
    trees: Sequence[Branches], drafts: int, least: float = -np.inf, *, most: float = np.inf
) -> list[list[int]]:
    """Of each tree the root and those of the `drafts` best nodes of all trees that are its own, at
    `most` so many, none with a score below `least`."""
    # In the order of scores and, among equals, of nodes: parents are never after their children.
    order = sorted(
        (-score, node, i)
        for i, tree in enumerate(trees)
        for node, score in enumerate(tree.scores)
        if node and score >= least
    )
    kept = [[0] for _ in trees]
    left = max(drafts, 0)
    for _, node, i in order:
        if not left:
            break
        # What follows a node that there is no room for finds none, either.
        if len(kept[i]) <= most:
            kept[i].append(node)
            left -= 1
    return [sorted(nodes) for nodes in kept]
