"""Which candidates of draft trees are verified: the most promising ones, over all requests together.

A budget of rows for the whole batch goes where it is most likely to be of use: a request whose
drafts promise much has more of them, one whose next token is anybody's guess has none. The drafts
decide nothing but how soon tokens come, so choosing them by what they promise is harmless.

Shapes: N requests, C candidates of each.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    @classmethod
    def room(cls, requests: int, candidates: int) -> Candidates:
        """To be filled."""
        shape = requests, candidates
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape))

    def best(self, drafts: int) -> Iterator[tuple[list[int], list[int]]]:
        """The `drafts` best of all requests together, or all that have any chance: of each request
        tokens and parents, numbered from 1 on, 0 for none."""
        kept = _largest(self.scores_NC.ravel(), drafts).reshape(self.scores_NC.shape)
        numbers = kept.cumsum(1)
        for tokens, parents, chosen, number in zip(
            self.tokens_NC, self.parents_NC, kept, numbers, strict=True
        ):
            above = parents[chosen]
            yield tokens[chosen].tolist(), np.where(above < 0, 0, number[above]).tolist()


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
