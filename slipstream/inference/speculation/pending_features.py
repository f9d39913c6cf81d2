"""Features that wait for a draft head to take them in, each with the token after it.

They lie where they came: with a request as it began, and step by step as the engine decoded. What
is drafted from is where they lie, sorted by request. Used by `eagle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from slipstream.models.draft.forward import Ints

GONE = -1


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request at `index` in the batch, `GONE` once it has ended: `cached` slots are filled;
    features that it began with may wait, `features_TD` and as many tokens."""

    index: int
    cached: int = 0
    features_TD: Tensor | None = None
    tokens: Sequence[int] = ()

    def forget(self) -> None:
        """Begin anew with the next feature."""
        self.cached, self.features_TD, self.tokens = 0, None, ()


@dataclass(slots=True)
class _FeatureStep:
    """What one step of the engine brought: to each of the rows that there were, `counts` of the
    `tokens` and, at the beginning of its row of `features_NWD`, the features before them."""

    rows: Sequence[PendingRequest]
    counts: list[int]
    # All in one list: hundreds of steps wait, and a list for each of their rows would be work for
    # the garbage collector.
    tokens: list[int]
    features_NWD: Tensor


@dataclass(frozen=True, slots=True)
class PendingFeatures:
    """T features that wait, sorted by request: `counts_N` of each, and the `tokens_T` after them.
    Token t follows line `_line_T[t]` of source `_source_T[t]`, whose lines are features (D,)."""

    counts_N: Ints
    tokens_T: Ints
    _sources: Sequence[Tensor]
    _source_T: Ints
    _line_T: Ints
    _in_order: bool = False
    """Whether the one source has features (N, W, D), those of a request first."""

    def addresses(self) -> Ints:
        """Where each feature lies in memory (T,): a line of numbers one after the other."""
        first = np.array([source.data_ptr() for source in self._sources])
        source = self._sources[0]
        return first[self._source_T] + source.shape[-1] * source.element_size() * self._line_T

    def padded(self) -> tuple[Ints, Tensor]:
        """Tokens (N, W) and features (N, W, D), those of a request first, anything beyond."""
        counts_N = self.counts_N
        if self._in_order:
            # As wide as what waits, not as what was verified: there is room for no more.
            features = self._sources[0][:, : int(counts_N.max())].contiguous()
            ids = np.zeros(features.shape[:2], np.int64)
            ids[np.arange(ids.shape[1]) < counts_N[:, None]] = self.tokens_T
            return ids, features
        lines = [source.flatten(0, -2) for source in self._sources]
        starts = np.cumsum([0, *map(len, lines[:-1])])
        index_T = torch.from_numpy(starts[self._source_T] + self._line_T)
        N, W, T = len(counts_N), int(counts_N.max()), len(self.tokens_T)
        first_T = np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        place_T = np.repeat(np.arange(N), counts_N) * W + np.arange(T) - first_T
        device = lines[0].device
        to_T = torch.from_numpy(place_T).to(device)
        ids = np.zeros(N * W, np.int64)
        ids[place_T] = self.tokens_T
        features = lines[0].new_zeros(N * W, lines[0].shape[-1])
        features[to_T] = torch.cat(lines)[index_T.to(device)]
        return ids.reshape(N, W), features.view(N, W, -1)


@dataclass(slots=True)
class PendingFeatureQueue:
    """At most `limit` bytes of steps are kept; where it is more, the oldest are forgotten."""

    limit: int
    nbytes: int = 0
    _steps: deque[_FeatureStep] = field(default_factory=deque)

    def __len__(self) -> int:
        """Steps that wait."""
        return len(self._steps)

    def add(
        self, rows: Sequence[PendingRequest], tokens: Sequence[Sequence[int]], features_NWD: Tensor
    ) -> None:
        """A step has brought `tokens` to `rows`, which begin anew where steps are forgotten."""
        flat = list(chain.from_iterable(tokens))
        self._steps.append(_FeatureStep(rows, list(map(len, tokens)), flat, features_NWD))
        self.nbytes += features_NWD.nbytes
        while self.nbytes > self.limit:
            oldest = self._steps.popleft()
            self.nbytes -= oldest.features_NWD.nbytes
            for row in oldest.rows:
                row.forget()

    def clear(self) -> None:
        """All have been taken in."""
        self._steps.clear()
        self.nbytes = 0

    def of(self, rows: Sequence[PendingRequest]) -> PendingFeatures | None:
        """What waits for `rows`, all there are; None where one of them has nothing."""
        begun = [row for row in rows if row.features_TD is not None]
        sources = [row.features_TD for row in begun if row.features_TD is not None]
        sources += [step.features_NWD for step in self._steps]
        if not sources:
            return None
        # After one step of the same batch, as mostly, all is in order.
        if not begun and len(self._steps) == 1 and self._steps[0].rows is rows:
            return _all_of(self._steps[0])
        # Pieces: what a request began with, what a step brought to a row.
        size = [1] * len(begun) + [len(step.rows) for step in self._steps]
        width = [1] * len(begun) + [step.features_NWD.shape[1] for step in self._steps]
        lengths = [len(row.tokens) for row in begun]
        lengths += chain.from_iterable(step.counts for step in self._steps)
        counts_P = np.array(lengths)
        ends_P: Ints = counts_P.cumsum()
        source_P = np.arange(len(sources)).repeat(size)
        place_P = np.arange(len(counts_P)) - np.repeat(np.cumsum(size) - size, size)
        line_P = place_P * np.repeat(width, size) - (ends_P - counts_P)
        line_T = line_P.repeat(counts_P) + np.arange(ends_P[-1])
        source_T = source_P.repeat(counts_P)
        brought = chain((row.tokens for row in begun), (step.tokens for step in self._steps))
        tokens_T = _ints(chain.from_iterable(brought), len(line_T))
        owners = chain(begun, chain.from_iterable(step.rows for step in self._steps))
        owner_P = _ints((row.index for row in owners), len(counts_P))
        owner_T = owner_P.repeat(counts_P)
        order = np.argsort(owner_T, kind="stable")
        # Those of requests that have ended come first.
        order = order[int((owner_T == GONE).sum()) :]
        counts_N = np.bincount(owner_T[order], minlength=len(rows))
        if not counts_N.all():
            return None
        return PendingFeatures(counts_N, tokens_T[order], sources, source_T[order], line_T[order])


def _all_of(step: _FeatureStep) -> PendingFeatures | None:
    """What one step brought to all of its rows."""
    if 0 in step.counts:
        return None
    width = step.features_NWD.shape[1]
    lines = [n * width + i for n, count in enumerate(step.counts) for i in range(count)]
    tokens_T, line_T = np.array(step.tokens), np.array(lines)
    return PendingFeatures(
        np.array(step.counts),
        tokens_T,
        [step.features_NWD],
        np.zeros_like(line_T),
        line_T,
        True,
    )


def _ints(numbers: Iterable[int], count: int) -> Ints:
    return np.fromiter(numbers, np.int64, count)
