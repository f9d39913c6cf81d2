"""Decides which decode steps are recorded as CUDA graphs, and with which shapes.

Recordings hold memory. Recordings for every number of tokens per request at every batch size would
hold too much. So the tokens of a request are padded to the number of tokens of a draft plan, as in
FastRL's bucketed graphs. Plans with equal numbers of tokens share recordings. A plan is recorded
only at batch sizes at which it can be chosen. If a selector can choose among several plans at a
batch size, plans that it seldom chooses are not recorded.

In this module a row is one token of a request in a decode step. Used by `graphs`, and in part by
`choice_graphs` and `speculation.draft_graphs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.attention import padded_keys
from slipstream.models.numerics import round_up

ROWS = 8
"""Batch sizes are rounded up to multiples of this, and smaller ones to powers of two."""

SEEN = 2
"""A shape is recorded only after it has occurred this often, because a recording takes as long as
many steps."""

OFTEN = 12
"""If a batch size has several kinds of steps, a kind is recorded only after this many steps. The
short probes of a selector end earlier."""

SHARE = 1 / 16
"""A kind of steps is recorded only if it is at least this fraction of the steps at its batch size.
"""

_HALVE_AFTER = 512
"""After this many steps at a batch size, its counts are halved, so that recent steps count more."""

Choices = Callable[[int], Sequence[DraftPlan] | None]
"""Lists all plans that may be chosen for a number of running requests; None if unknown."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The shape of a recorded step."""

    size: int
    """Rows per request: its last known token, its drafts and padding."""
    requests: int
    keys: int
    """Number of slots that attention reads."""
    on_paths: bool
    """Whether the rows are draft trees."""


class Sizes:
    """The number of rows to which the rows of each request are padded."""

    def __init__(self, choices: Choices | None = None) -> None:
        """Without `choices`, any plan may occur at any batch size."""
        self._choices = choices

    def of(self, rows: int, requests: int) -> int | None:
        """The padded number of rows for a step with `rows` rows per request. None if no plan for
        this number of requests can have that many rows."""
        plans = self._plans(requests)
        if rows == 1 or plans is None:
            return bucket(rows)
        fitting = [plan.verify_tokens for plan in plans if plan.verify_tokens >= rows]
        if fitting:
            return min(fitting)
        # Trees of a batch share its draft tokens, so some have more rows than the plan's average.
        most = max((plan.most_drafts(requests) for plan in plans), default=0)
        return bucket(rows) if rows <= 1 + most else None

    def only(self, size: int, requests: int) -> bool:
        """Whether `size` is the only padded number of rows of steps with drafts, or 1 (a step
        without drafts)."""
        plans = self._plans(requests)
        return size == 1 or (
            plans is not None and {plan.verify_tokens for plan in plans} - {1} == {size}
        )

    def _plans(self, requests: int) -> Sequence[DraftPlan] | None:
        return None if self._choices is None else self._choices(requests)


class Habits:
    """Counts how often shapes and kinds of steps occur. A kind is a row count or a draft plan."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        # By batch size, rounded up.
        self._kinds: dict[int, Counter[Hashable]] = {}

    def came(self, shape: Hashable, kind: Hashable, requests: int) -> None:
        """Count a step of `requests` requests (rounded up) with this shape and kind."""
        self._seen[shape] += 1
        kinds = self._kinds.setdefault(requests, Counter())
        kinds[kind] += 1
        if kinds.total() >= _HALVE_AFTER:
            _halve(kinds)

    def stays(self, shape: Hashable, kind: Hashable, requests: int, *, only: bool = False) -> bool:
        """Whether to record the shape of a step that `came` has just counted.

        It is recorded if it has occurred before, and its kind is frequent or the `only` one at its
        batch size.
        """
        if self._seen[shape] <= SEEN:
            return False
        kinds = self._kinds[requests]
        return only or kinds[kind] >= max(OFTEN, SHARE * kinds.total())

    def fade(self) -> None:
        """Halve all counts. Called when recordings are deleted: most shapes will occur again, so
        the counts are not reset."""
        _halve(self._seen)
        for kinds in self._kinds.values():
            _halve(kinds)


def _halve(counts: Counter[Hashable]) -> None:
    for key in list(counts):
        counts[key] //= 2
        if not counts[key]:
            del counts[key]


def bucket(count: int) -> int:
    """`count` rounded up to a power of two or 1.5 times one: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    size = 1
    while size < count:
        size = size * 3 // 2 if size % 2 == 0 and size * 3 // 2 >= count else size * 2
    return size


def bucket_of_requests(count: int) -> int:
    """`count` rounded up to one of 1, 2, 4, 8, 16, 24, 32, ..."""
    return 1 << (count - 1).bit_length() if count < ROWS else round_up(count, ROWS)


def bucket_of_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """The number of slots that attention reads for `length` positions, rounded up by `bucket`."""
    step = padded_keys(1, dtype, device)
    return bucket(padded_keys(length, dtype, device) // step) * step
