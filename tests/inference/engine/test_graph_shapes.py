"""Which decode steps are recorded as CUDA graphs."""

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

# FastRL's plans and thresholds.
PLANS = [*map(DraftPlan.parse, ("8_4_48", "8_4_32", "8_4_16", "8_4_8"))]
THRESHOLDS = [1, 2, 5, 21]


def bandit(bs_threshold: int | None = None) -> BanditSelector:
    """FastRL's bucketed epsilon-greedy selector."""
    buckets = buckets_by_rows(PLANS, THRESHOLDS)
    return BanditSelector(buckets, EpsilonGreedy(), bs_threshold=bs_threshold)


class Steps:
    """Counts decode steps as `DecodeGraphs` does, and tells which of them are recorded."""

    def __init__(self, choices: Choices | None = None) -> None:
        self.sizes, self.habits = Sizes(choices), Habits()

    def recorded(self, size: int, requests: int) -> bool:
        """Count a step and return whether it is recorded."""
        step = shape(size, requests)
        self.habits.came(step, size, step.requests)
        only = self.sizes.only(size, requests)
        return self.habits.stays(step, size, step.requests, only=only)

    def recorded_after(self, size: int, requests: int) -> int | None:
        """The number of steps before the first one that is recorded; None if 100 are not."""
        steps = (self.recorded(size, requests) for _ in range(100))
        return next((i for i, is_recorded in enumerate(steps) if is_recorded), None)


def shape(size: int, requests: int) -> Shape:
    return Shape(size, bucket_of_requests(requests), 512, False)


@pytest.mark.usefixtures("without_kernels")
def test_buckets_have_two_sizes_per_doubling() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 48, 49)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64)
    ]
    assert [bucket_of_requests(n) for n in (1, 2, 3, 5, 8, 9, 33)] == [1, 2, 4, 8, 8, 16, 40]
    cpu = torch.device("cpu")
    lengths = 1, 512, 513, 1025, 2000, 2049, 3000, 4000
    found = [bucket_of_keys(n, torch.bfloat16, cpu) // 512 for n in lengths]
    assert found == [1, 1, 2, 3, 4, 6, 6, 8]


def test_steps_are_padded_to_the_rows_of_plans() -> None:
    steps = Steps(bandit().choices)
    assert [steps.sizes.of(rows, 1) for rows in (1, 2, 40, 48)] == [1, 48, 48, 48]
    assert [steps.sizes.of(rows, 2) for rows in (2, 32)] == [32, 32]
    assert [steps.sizes.of(rows, 30) for rows in (5, 8)] == [8, 8]
    # Trees of one batch can have more rows than the plan's average.
    assert [steps.sizes.of(rows, 30) for rows in (9, 20)] == [12, 24]
    # No plan for one request has 49 rows.
    assert steps.sizes.of(49, 1) is None
    # With 30 requests, a tree has at most 4 + 7 * 16 drafts.
    assert steps.sizes.of(4 + 7 * 16 + 1, 30) == 128
    assert steps.sizes.of(4 + 7 * 16 + 2, 30) is None


def test_steps_with_drafts_are_not_recorded_beyond_the_batch_size_threshold() -> None:
    for selector in (
        bandit(bs_threshold=32),
        PredefinedSelector(DraftPlan.chain(3), bs_threshold=32),
        CostModelSelector([DraftPlan.chain(3)], bs_threshold=32),
    ):
        steps = Steps(selector.choices)
        assert steps.sizes.of(4, 32) is not None
        assert steps.sizes.of(4, 33) is None
        assert steps.sizes.of(1, 33) == 1


def test_without_a_selector_rows_are_padded_to_buckets() -> None:
    assert [Sizes().of(rows, 3) for rows in (1, 4, 5, 13)] == [1, 4, 6, 16]


def test_the_only_size_at_a_batch_size_is_recorded_after_a_few_steps() -> None:
    steps = Steps(bandit().choices)
    assert steps.recorded_after(16, 8) == SEEN
    assert steps.recorded_after(1, 8) == SEEN
    one = DraftPlan.chain(3)
    assert Steps(lambda running: [OFF, one]).recorded_after(4, 8) == SEEN


def test_one_of_several_sizes_is_recorded_if_it_is_frequent() -> None:
    plans = [OFF, *map(DraftPlan.chain, (1, 3, 7))]
    steps = Steps(lambda running: plans)
    assert steps.recorded_after(4, 8) == OFTEN - 1
    # Probes of another plan: 4 of every 100 steps.
    for _ in range(20):
        assert not any(steps.recorded(8, 8) for _ in range(4))
        for _ in range(96):
            assert steps.recorded(4, 8)
    # Batch sizes are counted separately.
    assert steps.recorded_after(4, 2) == OFTEN - 1


def test_a_plan_that_the_selector_changes_to_is_recorded_after_some_steps() -> None:
    plans = [*map(DraftPlan.chain, (3, 7))]
    steps = Steps(lambda running: plans)
    for _ in range(5000):
        steps.recorded(4, 8)
    after = steps.recorded_after(8, 8)
    assert after is not None
    assert after < 50


def test_counts_survive_the_deletion_of_recordings() -> None:
    plans = [*map(DraftPlan.chain, (3, 7))]
    steps = Steps(lambda running: plans)
    assert steps.recorded_after(4, 8) == OFTEN - 1
    for _ in range(OFTEN + 1):
        steps.recorded(4, 8)
    steps.habits.fade()
    assert steps.recorded(4, 8)
    for _ in range(6):
        steps.habits.fade()
    assert not steps.recorded(4, 8)


def recordings(choices: Sequence[DraftPlan], steps: Steps, requests: Sequence[int]) -> set[Shape]:
    """The shapes that are recorded while a batch shrinks and each plan is chosen 24 times at each
    batch size."""
    found = set()
    for running in requests:
        for _ in range(2 * OFTEN):
            for plan in choices:
                size = steps.sizes.of(plan.verify_tokens, running)
                if size is not None and steps.recorded(size, running):
                    found.add(shape(size, running))
    return found


def test_each_plan_is_recorded_only_at_the_batch_sizes_of_its_bucket() -> None:
    running = range(32, 0, -1)
    naive = recordings(PLANS, Steps(), running)
    bucketed = set[Shape]()
    steps = Steps(bandit().choices)
    for count in running:
        bucketed |= recordings(bandit().choices(count), steps, [count])
    # Batch sizes are rounded up to 1, 2, 4, 8, 16, 24 or 32.
    assert len(naive) == 4 * 7
    by_size = {size: {s.requests for s in bucketed if s.size == size} for size in (48, 32, 16, 8)}
    assert by_size == {48: {1}, 32: {2, 4}, 16: {8, 16, 24}, 8: {24, 32}}
