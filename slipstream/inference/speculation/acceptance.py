"""Acceptance rates of drafts by depth. Used by the selector and by the union of two proposers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from slipstream.inference.speculation.plan import DraftPlan

_FADE = 0.99
"""Least factor on the weight of earlier drafts, per step."""

_SIBLING = 0.8
"""Acceptance rate of a sibling whose earlier siblings were rejected, relative to that of the first
child. Measured with the quickstart's head (docs/log/trees.md)."""


class AcceptanceCurve:
    """Acceptance rate of drafts at each depth, given that all drafts before them were accepted.

    Older steps have less weight, because the policy changes. A depth without data is assumed to
    have the rate of the depth before it.
    """

    def __init__(self, *, kept: float = 200.0, guess: float = 0.6, guess_weight: float = 4.0):
        """The curve remembers about `kept` drafts, and at least those of 100 steps. `guess` is the
        prior rate, with the weight of `guess_weight` drafts."""
        self._kept, self._guess, self._weight = kept, guess, guess_weight
        self._accepted: list[float] = []
        self._tried: list[float] = []

    def record(self, drafted: Sequence[int], accepted: Sequence[int], steps: int = 1) -> None:
        """Learn from the numbers of drafted and accepted tokens of each request, in `steps` steps
        together."""
        deepest = max(drafted, default=0)
        while len(self._tried) < deepest:
            self._accepted.append(0.0)
            self._tried.append(0.0)
        # Depths beyond these drafts fade faster, towards the rate of the depth before them.
        slow = max(_FADE, 1 - len(drafted) / steps / self._kept)
        for depth in range(len(self._tried)):
            keep = (slow if depth < deepest else _FADE) ** steps
            self._accepted[depth] *= keep
            self._tried[depth] *= keep
        for (tried, correct), count in Counter(zip(drafted, accepted, strict=True)).items():
            # The first rejected draft was tried; drafts after it were not.
            for depth in range(min(tried, correct + 1)):
                self._tried[depth] += count
                self._accepted[depth] += count if depth < correct else 0

    def forget(self, keep: float) -> None:
        """Multiply the weight of all earlier drafts by `keep`."""
        self._accepted = [keep * x for x in self._accepted]
        self._tried = [keep * x for x in self._tried]

    @property
    def compared(self) -> float:
        """Number of earlier first drafts, by their weight."""
        return self._tried[0] if self._tried else 0.0

    def rate(self, depth: int, guess: float, weight: float) -> float:
        """Acceptance rate at `depth` (from 0); `guess` counts like `weight` drafts."""
        if depth >= len(self._tried):
            return guess
        return (self._accepted[depth] + weight * guess) / (self._tried[depth] + weight)

    def rates(self, depths: int) -> list[float]:
        """Acceptance rates of the first depths; the guess for a depth is the rate before it."""
        guess, found = self._guess, []
        for depth in range(depths):
            guess = self.rate(depth, guess, self._weight)
            found.append(guess)
        return found

    def expected(self, drafts: int) -> float:
        """Mean accepted tokens of a chain of `drafts`."""
        return expected_accepted(self.rates(drafts))


def expected_accepted(rates: Sequence[float]) -> float:
    """Mean accepted tokens of a chain with these acceptance rates by depth."""
    total, reach = 0.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


class TreeRatios:
    """Ratios of measured to predicted draft tokens of tree plans (accepted or verified ones).

    The ratio of a plan starts at the ratio of all trees and approaches its own. Older steps have
    less weight.
    """

    def __init__(self, *, kept: float = 200.0, trust: float = 40.0) -> None:
        """A plan remembers about `kept` requests; the ratio of all trees counts like `trust`."""
        self._kept, self._trust = kept, trust
        # By plan: sums of measured and predicted drafts, and requests.
        self._seen: dict[DraftPlan, tuple[float, float, float]] = {}
        # The same of all plans.
        self._measured = self._predicted = 0.0

    def record(
        self, plan: DraftPlan, measured: float, predicted: float, requests: int, steps: int = 1
    ) -> None:
        """Learn from measured and predicted draft tokens, as means of `requests` requests in
        `steps` steps."""
        old_measured, old_predicted, count = self._seen.get(plan, (0.0, 0.0, 0.0))
        keep = max(_FADE, 1 - requests / steps / self._kept) ** steps
        new_measured = keep * old_measured + requests * measured
        new_predicted = keep * old_predicted + requests * predicted
        self._seen[plan] = new_measured, new_predicted, keep * count + requests
        self._measured += new_measured - old_measured
        self._predicted += new_predicted - old_predicted

    def forget(self, keep: float) -> None:
        """Multiply the weight of all earlier steps by `keep`."""
        self._seen = {
            plan: (keep * measured, keep * predicted, keep * count)
            for plan, (measured, predicted, count) in self._seen.items()
        }
        self._measured *= keep
        self._predicted *= keep

    def ratio(self, plan: DraftPlan) -> float:
        """The ratio of measured to predicted draft tokens of a plan; 1 if no tree was recorded."""
        measured, predicted, count = self._seen.get(plan, (0.0, 0.0, 0.0))
        mean = predicted / count if count else 1.0
        weight = self._trust * max(mean, 1e-3)
        general = (self._measured + self._trust) / (self._predicted + self._trust)
        return (measured + weight * general) / (predicted + weight)


def tree_probabilities(rates: Sequence[float], plan: DraftPlan) -> tuple[float, ...]:
    """Estimated acceptance probabilities of the nodes that a tree plan verifies, in descending
    order. A node is accepted if all tokens from the root down to it are. `rates`: acceptance rates
    of first children by depth; they are rounded to hundredths, because results are cached."""
    return _tree_probabilities(tuple([round(rate, 2) for rate in rates]), plan)


@lru_cache(maxsize=512)
def _tree_probabilities(rates: tuple[float, ...], plan: DraftPlan) -> tuple[float, ...]:
    # Best first: a node is followed by its next sibling and by its own first child.
    nodes = [(-rates[0], 0, 0)]
    found: list[float] = []
    while nodes and len(found) < plan.verify_tokens - 1:
        negative, depth, before = heappop(nodes)
        found.append(-negative)
        if before + 1 < plan.topk:
            rate = rates[depth]
            # A sibling shares what the first child, or further siblings, leave over.
            left = 1 - _SIBLING * rate if before else _SIBLING * (1 - rate)
            heappush(nodes, (negative * left, depth, before + 1))
        if depth + 1 < plan.steps:
            heappush(nodes, (negative * rates[depth + 1], depth + 1, 0))
    return tuple(found)


def sum_of_best(probabilities: Sequence[float], count: float) -> float:
    """Sum of the first `count` probabilities; a fraction of the next one if `count` has one."""
    whole = int(count)
    rest = sum(probabilities[whole : whole + 1])
    return sum(probabilities[:whole]) + (count - whole) * rest
