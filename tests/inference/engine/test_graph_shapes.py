"""Which decode steps are worth a recording, and which are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.inference.engine.graph_shapes import (
    OFTEN,
    SEEN,
    Choices,
    Habits,
    Shape,
    Sizes,
    bucket,
    bucket_of_keys,
    bucket_of_requests,
)
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    buckets_by_rows,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import CostModelSelector, PredefinedSelector

# FastRL's own.
PLANS = [*map(DraftPlan.parse, ("8_4_48", "8_4_32", "8_4_16", "8_4_8"))]
THRESHOLDS = [1, 2, 5, 21]


def beg(bs_threshold: int | None = None) -> BanditSelector:
    buckets = buckets_by_rows(PLANS, THRESHOLDS)
    return BanditSelector(buckets, EpsilonGreedy(), bs_threshold=bs_threshold)


class Watched:
    """Steps of a selector, one after another."""

    def __init__(self, choices: Choices | None = None) -> None:
        self.sizes, self.habits = Sizes(choices), Habits()

    def wanted(self, size: int, requests: int) -> bool:
        """Whether a step is recorded that has just come up."""
        found = shape(size, requests)
        self.habits.came(found, size, found.requests)
        only = self.sizes.only(size, requests)
        return self.habits.stays(found, size, found.requests, only=only)

    def wanted_after(self, size: int, requests: int) -> int | None:
        """How many steps go by before one is recorded; None: a hundred do."""
        steps = (self.wanted(size, requests) for _ in range(100))
        return next((i for i, found in enumerate(steps) if found), None)


def shape(size: int, requests: int) -> Shape:
    return Shape(size, bucket_of_requests(requests), 512, False)


@pytest.mark.usefixtures("without_kernels")
def test_buckets_waste_at_most_half() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 48, 49)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64)
    ]
    assert [bucket_of_requests(n) for n in (1, 2, 3, 5, 8, 9, 33)] == [1, 2, 4, 8, 8, 16, 40]
    cpu = torch.device("cpu")
    lengths = 1, 512, 513, 1025, 2000, 2049, 3000, 4000
    found = [bucket_of_keys(n, torch.bfloat16, cpu) // 512 for n in lengths]
    assert found == [1, 1, 2, 3, 4, 6, 6, 8]


def test_steps_are_filled_up_to_the_rows_of_plans() -> None:
    watched = Watched(beg().choices)
    assert [watched.sizes.of(rows, 1) for rows in (1, 2, 40, 48)] == [1, 48, 48, 48]
    assert [watched.sizes.of(rows, 2) for rows in (2, 32)] == [32, 32]
    assert [watched.sizes.of(rows, 30) for rows in (5, 8)] == [8, 8]
    # More than a plan has on average: some of its trees have more, others less.
    assert [watched.sizes.of(rows, 30) for rows in (9, 20)] == [12, 24]
    # No plan for one request has so many rows.
    assert watched.sizes.of(49, 1) is None
    # Nor for any number.
    assert watched.sizes.of(4 + 7 * 16 + 1, 30) == 128
    assert watched.sizes.of(4 + 7 * 16 + 2, 30) is None


def test_without_drafts_beyond_the_threshold_nothing_else_is_recorded() -> None:
    for selector in (
        beg(bs_threshold=32),
        PredefinedSelector(DraftPlan.chain(3), bs_threshold=32),
        CostModelSelector([DraftPlan.chain(3)], bs_threshold=32),
    ):
        watched = Watched(selector.choices)
        assert watched.sizes.of(4, 32) is not None
        assert watched.sizes.of(4, 33) is None
        assert watched.sizes.of(1, 33) == 1


def test_without_selectors_sizes_are_those_of_buckets() -> None:
    assert [Sizes().of(rows, 3) for rows in (1, 4, 5, 13)] == [1, 4, 6, 16]


def test_the_only_size_at_a_batch_size_is_recorded_soon() -> None:
    watched = Watched(beg().choices)
    assert watched.wanted_after(16, 8) == SEEN
    assert watched.wanted_after(1, 8) == SEEN
    one = DraftPlan.chain(3)
    assert Watched(lambda running: [OFF, one]).wanted_after(4, 8) == SEEN


def test_one_of_several_is_recorded_once_it_comes_often() -> None:
    plans = [OFF, *map(DraftPlan.chain, (1, 3, 7))]
    watched = Watched(lambda running: plans)
    assert watched.wanted_after(4, 8) == OFTEN - 1
    # Looks of four steps at another plan, one in a hundred.
    for _ in range(20):
        assert not any(watched.wanted(8, 8) for _ in range(4))
        for _ in range(96):
            assert watched.wanted(4, 8)
    # Other batch sizes are others.
    assert watched.wanted_after(4, 2) == OFTEN - 1


def test_what_is_chosen_from_now_on_is_recorded_after_some_steps() -> None:
    plans = [*map(DraftPlan.chain, (3, 7))]
    watched = Watched(lambda running: plans)
    for _ in range(5000):
        watched.wanted(4, 8)
    after = watched.wanted_after(8, 8)
    assert after is not None
    assert after < 50


def test_what_has_come_up_is_remembered_when_recordings_end() -> None:
    plans = [*map(DraftPlan.chain, (3, 7))]
    watched = Watched(lambda running: plans)
    assert watched.wanted_after(4, 8) == OFTEN - 1
    for _ in range(OFTEN + 1):
        watched.wanted(4, 8)
    watched.habits.fade()
    assert watched.wanted(4, 8)
    for _ in range(6):
        watched.habits.fade()
    assert not watched.wanted(4, 8)


def recordings(
    choices: Sequence[DraftPlan], watched: Watched, requests: Sequence[int]
) -> set[Shape]:
    """What is recorded where all of these plans come up again and again as a batch shrinks."""
    found = set()
    for running in requests:
        for _ in range(2 * OFTEN):
            for plan in choices:
                size = watched.sizes.of(plan.verify_tokens, running)
                if size is not None and watched.wanted(size, running):
                    found.add(shape(size, running))
    return found


def test_graphs_are_bucketed_and_not_of_all_plans_at_all_batch_sizes() -> None:
    running = range(32, 0, -1)
    naive = recordings(PLANS, Watched(), running)
    bucketed = set[Shape]()
    watched = Watched(beg().choices)
    for count in running:
        bucketed |= recordings(beg().choices(count), watched, [count])
    # Of 1, 2, 4, 8, 16, 24 and 32 requests.
    assert len(naive) == 4 * 7
    by_size = {size: {s.requests for s in bucketed if s.size == size} for size in (48, 32, 16, 8)}
    assert by_size == {48: {1}, 32: {2, 4}, 16: {8, 16, 24}, 8: {24, 32}}
