"""How sure a draft head may be: how far its scores are from the policy's, learned from what comes.

A candidate is held to be right with its share of exp((score + noise) / scale) among the best of its
row. A head that is nearly the policy can be sure of small gaps between scores (a small scale), a
new one cannot. Of a few scales the one is taken under which what came out was most likely, lately.
"""

from __future__ import annotations

import numpy as np

from slipstream.models.draft.forward import Floats

SCALES = np.array([0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0, 1.4])

_FIRST = 7
"""1.0, before anything is known."""

_KEPT = 500.0
"""Drafts that are remembered, about."""

_AT_ONCE = 32
"""Drafts that are learned from together."""

_TRUST = 4.0
"""Nats by which another scale must have been better than the first one, to begin with."""


class Sureness:
    """The scale, and what it is learned from."""

    def __init__(self) -> None:
        # Nats by which what came out was unlikely; the first one has a little in advance.
        self._lost = np.full(len(SCALES), _TRUST)
        self._lost[_FIRST] = 0.0
        self._gaps: list[Floats] = []
        self._right: list[bool] = []

    @property
    def scale(self) -> float:
        return float(SCALES[int(self._lost.argmin())])

    def learn(self, gaps_NW: Floats, right_N: list[bool]) -> None:
        """Whether the best token of each row came out; `gaps_NW` of scores below its own, 0 the
        first. It is taken in with what comes later: a call for each step would take as long as a
        small head's draft."""
        self._gaps.append(gaps_NW)
        self._right += right_N
        if len(self._right) < _AT_ONCE and len(self._gaps) < _AT_ONCE:
            return
        gaps, right = np.concatenate(self._gaps), np.array(self._right)
        self._gaps.clear()
        self._right.clear()
        # A row without a number has no best token: it counts as half.
        sums = np.exp(gaps[None] / SCALES[:, None, None]).sum(-1)
        shares = 1 / np.where(sums > 0, sums, 2.0)
        chances = np.where(right, shares, 1 - shares)
        self._lost *= max(0.0, 1 - len(right) / _KEPT)
        self._lost -= np.log(np.maximum(chances, 1e-3)).sum(1)
