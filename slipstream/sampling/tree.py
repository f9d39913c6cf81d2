"""Select the draft-tree candidates to verify: the best ones of all requests together.

The whole batch shares a budget of draft tokens. It goes to the candidates with the highest
estimated acceptance probability. So a request with likely drafts verifies more of them, and a
request with an uncertain next token may verify none. Drafts affect only the speed, not the tokens,
so any selection is lossless.

Shapes: N requests, C candidates of each, W compared tokens of the first level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.kernels.draft.select_nodes import select_nodes


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of all draft trees of a batch."""

    tokens_NC: npt.NDArray[np.int64]
    parents_NC: npt.NDArray[np.int64]
    """The index of each candidate's parent, which comes before it; -1 for the first level."""
    scores_NC: npt.NDArray[np.float64]
    """The logarithm of the estimated acceptance probability of all tokens from the root to the
    candidate. It never exceeds the parent's score."""
    gaps_NW: npt.NDArray[np.float64]
    """Score differences of the best tokens of the first level to the first of them (at most 0)."""

    def best_of_each(
        self, drafts: int, least: float = -np.inf
    ) -> Iterator[tuple[list[int], list[int], list[float], int | None]]:
        """Yield the `drafts` best candidates of each request, in the form of `best`.

        Use it if requests are padded to the widest one, so that unused drafts cost the same.
        """
        for n in range(len(self.scores_NC)):
            row = slice(n, n + 1)
            one = Candidates(
                self.tokens_NC[row], self.parents_NC[row], self.scores_NC[row], self.gaps_NW[row]
            )
            yield from one.best(drafts, least)

    def best(
        self, drafts: int, least: float = -np.inf
    ) -> Iterator[tuple[list[int], list[int], list[float], int | None]]:
        """Yield tokens, parents and scores of the selected candidates of each request, and one
        more token or None: the first child of the last node in its chain of selected first
        children. This child was drafted, but not selected.

        At most `drafts` candidates of all requests are selected, those with the best scores. None
        has a score below `least` or of -inf. Parents are numbered from 1 in each request, and 0 is
        the root. A node's best child comes right after it.
        """
        N, C = self.scores_NC.shape
        size = max(min(drafts, N * C), 1)
        tokens, parents, counts, left_out = (np.empty(n, np.int64) for n in (size, size, N, N))
        scores = np.empty(size)
        arrays = [
            np.ascontiguousarray(x) for x in (self.tokens_NC, self.parents_NC, self.scores_NC)
        ]
        out = (array.ctypes.data for array in (tokens, parents, scores, counts, left_out))
        count = select_nodes(*(array.ctypes.data for array in arrays), N, C, drafts, least, *out)
        del arrays  # The kernel used them until here.
        lists = tokens[:count].tolist(), parents[:count].tolist(), scores[:count].tolist()
        begin = 0
        for end, token in zip(counts.cumsum().tolist(), left_out.tolist(), strict=True):
            part = slice(begin, end)
            yield lists[0][part], lists[1][part], lists[2][part], token if token >= 0 else None
            begin = end


@dataclass(slots=True)
class GrowingTree:
    """A draft tree to which paths can be added. Node 0, the root, is the last known token."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]
    ) -> GrowingTree:
        """Return a tree from copies of the lists. `scores` has no entry for the root."""
        return cls([*tokens], [*parents], [0.0, *scores])

    def add(self, path: Sequence[int], scores: Sequence[float]) -> None:
        """Add a path of tokens below the root.

        Tokens that the tree already has on this path keep the better of both scores.
        """
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

    def next_left_out(self, kept: Sequence[int], after_all: int | None) -> int | None:
        """Return the token of the first node that is not in `kept`, along first children from the
        root. Return `after_all` if all of these nodes are kept.
        """
        node, is_kept = 0, set(kept)
        while (child := next(self._children(node), None)) is not None:
            if child not in is_kept:
                return self.tokens[child]
            node = child
        return after_all

    def _children(self, node: int) -> Iterator[int]:
        return (
            child for child in range(node + 1, len(self.parents)) if self.parents[child] == node
        )

    def _child(self, node: int, token: int) -> int | None:
        return next((c for c in self._children(node) if self.tokens[c] == token), None)

    def part(self, kept: Sequence[int]) -> GrowingTree:
        """Return the tree of the nodes `kept`: ascending, with the root and all parents."""
        number = {node: i for i, node in enumerate(kept)}
        return GrowingTree(
            [self.tokens[node] for node in kept],
            [number.get(self.parents[node], -1) for node in kept],
            [self.scores[node] for node in kept],
        )


def best_nodes(
    trees: Sequence[GrowingTree], drafts: int, least: float = -np.inf, *, most: float = np.inf
) -> list[list[int]]:
    """Return for each tree its root and its share of the `drafts` best nodes of all trees.

    A tree gets at most `most` nodes besides the root, and no node with a score below `least`.
    """
    # Sorted by score, then by node, so that parents come before their children.
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
        # If a node does not fit, the nodes below it come later and do not fit either.
        if len(kept[i]) <= most:
            kept[i].append(node)
            left -= 1
    return [sorted(nodes) for nodes in kept]
