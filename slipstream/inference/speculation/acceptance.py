"""How often drafts are right, by depth. Used by the selector and by the union of two proposers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from slipstream.inference.speculation.plan import DraftPlan

_FADE = 0.99

_SIBLING = 0.8
"""How often a further draft in the place of one is right where those before it are not, of how
often the first one is: what the quickstart's head has of it (docs/log/trees.md)."""


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

    def rates(self, depths: int, like: AcceptanceCurve | None = None) -> list[float]:
        """`share` of the first depths: one that was tried less often takes after the one before,
        or after the same depth of another curve, as far as anything was tried there."""
        guess, found = self._guess, []
        for depth in range(depths):
            if like is not None and depth < len(like._tried):
                guess = like.share(depth, guess, self._weight)
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


class TreeYields:
    """Accepted drafts of trees, or verified ones, against what chains let expect: the share is a
    plan's own as far as it has been seen, and else that of all trees. Old steps fade."""

    def __init__(self, *, kept: float = 200.0, trust: float = 40.0) -> None:
        """About `kept` drafts of a plan are remembered; the share of all trees counts like `trust`
        requests."""
        self._kept, self._trust = kept, trust
        # Accepted and expected drafts, of requests; and of all plans together.
        self._seen: dict[DraftPlan, tuple[float, float, float]] = {}
        self._right = self._expected = 0.0

    def record(
        self, plan: DraftPlan, accepted: float, expected: float, requests: int, steps: int = 1
    ) -> None:
        """So many requests of so many steps had so many drafts accepted (or verified) and expected,
        on average."""
        right, guess, count = self._seen.get(plan, (0.0, 0.0, 0.0))
        keep = max(_FADE, 1 - requests / steps / self._kept) ** steps
        seen = keep * right + requests * accepted, keep * guess + requests * expected
        self._seen[plan] = (*seen, keep * count + requests)
        self._right += seen[0] - right
        self._expected += seen[1] - guess

    def forget(self, keep: float) -> None:
        """Let what was seen count only `keep` times as much."""
        self._seen = {
            plan: (keep * right, keep * guess, keep * count)
            for plan, (right, guess, count) in self._seen.items()
        }
        self._right *= keep
        self._expected *= keep

    def share(self, plan: DraftPlan, guess: float = 1.0) -> float:
        """Accepted drafts of a plan over expected ones, `guess` where none have been seen."""
        right, expected, count = self._seen.get(plan, (0.0, 0.0, 0.0))
        mean = expected / count if count else 1.0
        weight = self._trust * max(mean, 1e-3)
        return (right + weight * self._general(guess)) / (expected + weight)

    def _general(self, guess: float) -> float:
        return (self._right + self._trust * guess) / (self._expected + self._trust)


def chances_of_tree(rates: Sequence[float], plan: DraftPlan) -> tuple[float, ...]:
    """Of each draft that a plan verifies the chance that all tokens down to it are right, the best
    first, where first drafts are right so often after right ones (to a hundredth)."""
    return _chances_of_tree(tuple([round(rate, 2) for rate in rates]), plan)


@lru_cache(maxsize=512)
def _chances_of_tree(rates: tuple[float, ...], plan: DraftPlan) -> tuple[float, ...]:
    # By what they promise: of siblings the next one, and the first one after each, come after it.
    nodes = [(-rates[0], 0, 0)]
    found: list[float] = []
    while nodes and len(found) < plan.verify_tokens - 1:
        chance, depth, before = heappop(nodes)
        found.append(-chance)
        if before + 1 < plan.topk:
            rate = rates[depth]
            # Of what the first one leaves over, and of what further ones do.
            left = 1 - _SIBLING * rate if before else _SIBLING * (1 - rate)
            heappush(nodes, (chance * left, depth, before + 1))
        if depth + 1 < plan.steps:
            heappush(nodes, (chance * rates[depth + 1], depth + 1, 0))
    return tuple(found)


def best_of(chances: Sequence[float], drafts: float) -> float:
    """How many of the best `drafts` are right, on average."""
    whole = int(drafts)
    return sum(chances[:whole]) + (drafts - whole) * sum(chances[whole : whole + 1])
