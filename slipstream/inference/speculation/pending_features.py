"""Pending features: hidden states of the policy that a draft head has not processed yet, each with
the token after it.

They stay in the tensors in which they arrived: one per new request, and one per decode step. The
head's prefill gets the address of each feature, sorted by request, or a padded copy. Used by
`eagle`.

Shapes: N requests, W tokens per request, T pending features of all requests, P pieces (the features
that one tensor has for one request), D feature width.
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

ENDED = -1
"""The index of a request that is no longer in the batch."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request's place in the batch and its state in the draft head.

    `index` is its row, or `ENDED`. `cached` slots of the head's KV cache are filled. `features_TD`
    and `tokens` are the pending features that it started with, and the tokens after them.
    """

    index: int
    cached: int = 0
    features_TD: Tensor | None = None
    tokens: Sequence[int] = ()

    def forget(self) -> None:
        """Drop cache and features: the head starts again with the next feature."""
        self.cached, self.features_TD, self.tokens = 0, None, ()


@dataclass(slots=True)
class _FeatureStep:
    """The features of one decode step. Row n got `counts[n]` of the `tokens`; the features before
    them are at the start of row n of `features_NWD`."""

    rows: Sequence[PendingRequest]
    counts: list[int]
    # One list for all rows. Hundreds of steps can be pending, and a list per row of each step would
    # slow down garbage collection.
    tokens: list[int]
    features_NWD: Tensor


@dataclass(frozen=True, slots=True)
class PendingFeatures:
    """T pending features, sorted by request: `counts_N` of each request, and the tokens after them.

    The feature before token t is line `_line_T[t]` of tensor `_source_T[t]`, if that tensor is
    viewed as lines (D,).
    """

    counts_N: Ints
    tokens_T: Ints
    _sources: Sequence[Tensor]
    _source_T: Ints
    _line_T: Ints
    _in_order: bool = False
    """Whether there is one source (N, W, D) with the rows of the batch in order."""

    def addresses(self) -> Ints:
        """The memory address (T,) of each feature, which is contiguous."""
        first = np.array([source.data_ptr() for source in self._sources])
        source = self._sources[0]
        return first[self._source_T] + source.shape[-1] * source.element_size() * self._line_T

    def padded(self) -> tuple[Ints, Tensor]:
        """Tokens (N, W) and features (N, W, D). Entries beyond a request's count are arbitrary."""
        counts_N = self.counts_N
        if self._in_order:
            # Cut to the pending tokens. The source can be wider, because it also has the features
            # of rejected drafts, for which the head's KV cache has no room.
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
    """Pending features of decode steps, at most `limit` bytes; the oldest steps are dropped."""

    limit: int
    nbytes: int = 0
    _steps: deque[_FeatureStep] = field(default_factory=deque)

    def __len__(self) -> int:
        """Number of pending steps."""
        return len(self._steps)

    def add(
        self, rows: Sequence[PendingRequest], tokens: Sequence[Sequence[int]], features_NWD: Tensor
    ) -> None:
        """Add a step with the new `tokens` of `rows`. If an old step is dropped, the head starts
        again for its requests."""
        flat = list(chain.from_iterable(tokens))
        self._steps.append(_FeatureStep(rows, list(map(len, tokens)), flat, features_NWD))
        self.nbytes += features_NWD.nbytes
        while self.nbytes > self.limit:
            oldest = self._steps.popleft()
            self.nbytes -= oldest.features_NWD.nbytes
            for row in oldest.rows:
                row.forget()

    def clear(self) -> None:
        """Remove all steps, after the head has processed them."""
        self._steps.clear()
        self.nbytes = 0

    def of(self, rows: Sequence[PendingRequest]) -> PendingFeatures | None:
        """The pending features of `rows`, which are all rows of the batch; None if a row has
        none."""
        started = [row for row in rows if row.features_TD is not None]
        sources = [row.features_TD for row in started if row.features_TD is not None]
        sources += [step.features_NWD for step in self._steps]
        if not sources:
            return None
        # The common case: the batch did not change, and only its last step is pending.
        if not started and len(self._steps) == 1 and self._steps[0].rows is rows:
            return _all_of(self._steps[0])
        # Pieces: the first features of a request, or the features of one row in one step.
        size = [1] * len(started) + [len(step.rows) for step in self._steps]
        width = [1] * len(started) + [step.features_NWD.shape[1] for step in self._steps]
        lengths = [len(row.tokens) for row in started]
        lengths += chain.from_iterable(step.counts for step in self._steps)
        counts_P = np.array(lengths)
        ends_P: Ints = counts_P.cumsum()
        source_P = np.arange(len(sources)).repeat(size)
        place_P = np.arange(len(counts_P)) - np.repeat(np.cumsum(size) - size, size)
        line_P = place_P * np.repeat(width, size) - (ends_P - counts_P)
        line_T = line_P.repeat(counts_P) + np.arange(ends_P[-1])
        source_T = source_P.repeat(counts_P)
        tokens = chain((row.tokens for row in started), (step.tokens for step in self._steps))
        tokens_T = _ints(chain.from_iterable(tokens), len(line_T))
        owners = chain(started, chain.from_iterable(step.rows for step in self._steps))
        owner_P = _ints((row.index for row in owners), len(counts_P))
        owner_T = owner_P.repeat(counts_P)
        order = np.argsort(owner_T, kind="stable")
        # Drop the features of ended requests, which come first.
        order = order[int((owner_T == ENDED).sum()) :]
        counts_N = np.bincount(owner_T[order], minlength=len(rows))
        if not counts_N.all():
            return None
        return PendingFeatures(counts_N, tokens_T[order], sources, source_T[order], line_T[order])


def _all_of(step: _FeatureStep) -> PendingFeatures | None:
    """The features of a step, in its order; None if a row got no token."""
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
