"""Which decode steps are recorded: in what shapes, and which of these often enough.

A recording holds memory, and recordings of all numbers of rows to verify at all batch sizes would
hold much. So there are graphs for one number of rows after another (FastRL's "bucketed" graphs):
steps are filled up to the numbers of the draft plans, plans of the same number share what is
recorded, and only at batch sizes at which one of them may be chosen. A selector that may choose
among many at all sizes is watched: what it seldom does is not recorded. Used by
`graphs`, and in part by `speculation.draft_graphs`.
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
"""From here on requests are rounded up to multiples of it; below, to powers of two."""

SEEN = 2
"""Times that a shape has come up before it is recorded: recording takes as long as many steps."""

OFTEN = 12
"""Steps of a kind that is one of several before it is recorded: what a selector looks at comes and
goes sooner."""

SHARE = 1 / 16
"""Of the steps at a batch size: a kind that comes up less often is not recorded."""

_LATELY = 512
"""Steps at a batch size after which what was counted there counts half."""

Choices = Callable[[int], Sequence[DraftPlan] | None]
"""All plans that may be chosen while so many requests run; None where nobody knows."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Of a recorded step."""

    size: int
    """Rows of each request, its last known token among them."""
    requests: int
    keys: int
    """Slots that are attended to."""
    on_paths: bool
    """Whether the rows are draft trees."""


class Sizes:
    """What the rows of a request are filled up to."""

    def __init__(self, choices: Choices | None = None) -> None:
        """Without `choices` any plan may come up at any batch size."""
        self._choices = choices

    def of(self, rows: int, requests: int) -> int | None:
        """For a step of so many `rows` of each request; None where it cannot come of a plan for so
        many requests."""
        plans = self._plans(requests)
        if rows == 1 or plans is None:
            return bucket(rows)
        fitting = [plan.verify_tokens for plan in plans if plan.verify_tokens >= rows]
        if fitting:
            return min(fitting)
        # Of a batch's trees those of which more is expected have more rows than the others.
        most = max((plan.most_drafts(requests) for plan in plans), default=0)
        return bucket(rows) if rows <= 1 + most else None

    def only(self, size: int, requests: int) -> bool:
        """Whether steps have this size if they have drafts, or have none."""
        plans = self._plans(requests)
        return size == 1 or (
            plans is not None and {plan.verify_tokens for plan in plans} - {1} == {size}
        )

    def _plans(self, requests: int) -> Sequence[DraftPlan] | None:
        return None if self._choices is None else self._choices(requests)


class Habits:
    """How often shapes have come up, and kinds of them: sizes, or draft plans."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        # By requests, rounded up.
        self._kinds: dict[int, Counter[Hashable]] = {}

    def came(self, shape: Hashable, kind: Hashable, requests: int) -> None:
        """Count a step."""
        self._seen[shape] += 1
        kinds = self._kinds.setdefault(requests, Counter())
        kinds[kind] += 1
        if kinds.total() >= _LATELY:
            _halve(kinds)

    def stays(self, shape: Hashable, kind: Hashable, requests: int, *, only: bool = False) -> bool:
        """Whether a shape that has just come up is worth a recording: it has before, and its kind
        is the `only` one, or came often."""
        if self._seen[shape] <= SEEN:
            return False
        kinds = self._kinds[requests]
        return only or kinds[kind] >= max(OFTEN, SHARE * kinds.total())

    def fade(self) -> None:
        """Recordings have ended. What came up before counts half: most of it will come again."""
        _halve(self._seen)
        for kinds in self._kinds.values():
            _halve(kinds)


def _halve(counts: Counter[Hashable]) -> None:
    for key in list(counts):
        counts[key] //= 2
        if not counts[key]:
            del counts[key]


def bucket(count: int) -> int:
    """`count` rounded up to two sizes in each doubling: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    size = 1
    while size < count:
        size = size * 3 // 2 if size % 2 == 0 and size * 3 // 2 >= count else size * 2
    return size


def bucket_of_requests(count: int) -> int:
    """1, 2, 4, 8, 16, 24, ..."""
    return 1 << (count - 1).bit_length() if count < ROWS else round_up(count, ROWS)


def bucket_of_keys(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """What attention to `length` positions takes, rounded up as `bucket` does."""
    step = padded_keys(1, dtype, device)
    return bucket(padded_keys(length, dtype, device) // step) * step
