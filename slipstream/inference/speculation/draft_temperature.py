"""Draft temperature: calibrates the scores of a draft head to observed acceptance.

The estimated acceptance probability of a candidate is a softmax over the best candidates of its
node: exp((score + noise) / temperature), normalized. For a head close to the policy, small score
differences are reliable, so its temperature is low; a new head needs a high one. Of a fixed set of
temperatures, the one with the highest likelihood of recent outcomes is used.

Shapes: N requests, W best candidates of the first node.
"""

from __future__ import annotations

import numpy as np

from slipstream.models.draft.forward import Floats

TEMPERATURES = np.array([0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0, 1.4])

_FIRST = 7
"""Index of 1.0, the temperature before anything was observed."""

_KEPT = 500.0
"""Approximate number of drafts that are remembered."""

_AT_ONCE = 32
"""Drafts per update."""

_TRUST = 4.0
"""Log-likelihood, in nats, that another temperature needs to replace the first one."""


class DraftTemperature:
    """Estimates the draft temperature by maximum likelihood."""

    def __init__(self) -> None:
        # Negative log-likelihoods of the outcomes, with an advantage for the first temperature.
        self._losses = np.full(len(TEMPERATURES), _TRUST)
        self._losses[_FIRST] = 0.0
        self._gaps: list[Floats] = []
        self._accepted: list[bool] = []

    @property
    def value(self) -> float:
        """The temperature with the highest likelihood."""
        return float(TEMPERATURES[int(self._losses.argmin())])

    def learn(self, gaps_NW: Floats, accepted_N: list[bool]) -> None:
        """Learn from one draft per request. `accepted_N`: whether the policy sampled the best
        candidate. `gaps_NW`: scores of the candidates minus the best one, in descending order, so
        the first gap is 0. Drafts are collected, because an update per step would take as long as
        the draft of a small head."""
        self._gaps.append(gaps_NW)
        self._accepted += accepted_N
        if len(self._accepted) < _AT_ONCE and len(self._gaps) < _AT_ONCE:
            return
        gaps, accepted = np.concatenate(self._gaps), np.array(self._accepted)
        self._gaps.clear()
        self._accepted.clear()
        # A row without finite scores has no best candidate: it counts as one half.
        sums = np.exp(gaps[None] / TEMPERATURES[:, None, None]).sum(-1)
        shares = 1 / np.where(sums > 0, sums, 2.0)
        likelihoods = np.where(accepted, shares, 1 - shares)
        self._losses *= max(0.0, 1 - len(accepted) / _KEPT)
        self._losses -= np.log(np.maximum(likelihoods, 1e-3)).sum(1)
