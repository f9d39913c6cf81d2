"""How often drafts are right, by depth. Used by the selector and by the union of two proposers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_FADE = 0.99


class AcceptanceCurve:
    """How often the draft of each depth is right, given that those before it are.

    Old steps fade: the policy drifts. Depths never tried are taken to be like the deepest one that
    was.
    """

    def __init__(self, *, kept: float = 200.0, guess: float = 0.6, guess_weight: float = 4.0):
        """About `kept` drafts are remembered, those of 100 steps at least; `guess` counts like
        `guess_weight` trials."""
        self._kept, self._guess, self._weight = kept, guess, guess_weight
        self._right: list[float] = []
        self._tried: list[float] = []

    def record(self, drafted: Sequence[int], accepted: Sequence[int], steps: int = 1) -> None:
        """Drafts and how many of them were accepted, per request and step."""
        deepest = max(drafted, default=0)
        while len(self._tried) < deepest:
            self._right.append(0.0)
            self._tried.append(0.0)
        # Depths that are no longer tried soon take after the ones before them again.
        slow = max(_FADE, 1 - len(drafted) / steps / self._kept)
        for depth in range(len(self._tried)):
            keep = (slow if depth < deepest else _FADE) ** steps
            self._right[depth] *= keep
            self._tried[depth] *= keep
        for (drafts, right), count in Counter(zip(drafted, accepted, strict=True)).items():
            for depth in range(min(drafts, right + 1)):
                self._tried[depth] += count
                self._right[depth] += count if depth < right else 0

    def forget(self, keep: float) -> None:
        """Let what was seen count only `keep` times as much."""
        self._right = [keep * x for x in self._right]
        self._tried = [keep * x for x in self._tried]

    def share(self, depth: int, guess: float, weight: float) -> float:
        """Share of right drafts at `depth` (from 0) after right ones, where `guess` counts like
        `weight` trials."""
        if depth >= len(self._tried):
            return guess
        return (self._right[depth] + weight * guess) / (self._tried[depth] + weight)

    def rates(self, depths: int) -> list[float]:
        """`share` of the first depths: one that was tried less often takes after the one before."""
        guess, found = self._guess, []
        for depth in range(depths):
            guess = self.share(depth, guess, self._weight)
            found.append(guess)
        return found

    def expected(self, drafts: int) -> float:
        """Accepted tokens of a chain of `drafts`, on average."""
        return expected_accepted(self.rates(drafts))


def expected_accepted(rates: Sequence[float]) -> float:
    """Accepted tokens of a chain, on average, whose drafts are right so often after right ones."""
    total, reach = 0.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total
