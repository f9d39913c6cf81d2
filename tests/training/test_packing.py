"""Packing of rows into micro-batches: plans, tensors, and rejected batches."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import DataError
from slipstream.models.config import ContextLimit
from slipstream.models.shared_rows import SharedRows
from slipstream.training.columns import train_batch
from slipstream.training.packing import (
    build_micro_batch,
    check_batch,
    column,
    padded_length,
    plan_micro_batches,
    prompt_groups,
    prompt_length,
)
from slipstream.types import TrainRow
from tests.training.helpers import make_batch


def test_plan_trades_padding_against_micro_batches() -> None:
    # Padded widths 16, 16, 32, 112; each micro-batch costs 64 tokens in addition.
    lengths = {0: 100, 1: 10, 2: 16, 3: 17}

    # Padding the two short rows to 32 adds 32 tokens, less than another micro-batch.
    assert plan_micro_batches(lengths, max_tokens=1000) == [[1, 2, 3], [0]]
    assert plan_micro_batches(lengths, max_tokens=112) == [[1, 2, 3], [0]]
    assert plan_micro_batches(lengths, max_tokens=None, max_rows=2) == [[1, 2], [3], [0]]
    # Rows of equal width are split at the budget only.
    assert plan_micro_batches(dict.fromkeys(range(5), 30), max_tokens=70) == [[0, 1], [2, 3], [4]]
    assert plan_micro_batches({}, max_tokens=70) == []


def test_plan_keeps_padding_small_under_a_large_budget() -> None:
    lengths = {i: 20 + (i * 53) % 130 for i in range(60)}

    plan = plan_micro_batches(lengths, max_tokens=100_000)

    padded = sum(len(part) * padded_length(max(lengths[i] for i in part)) for part in plan)
    assert padded < 1.15 * sum(lengths.values())
    assert len(plan) < 10


def test_plan_covers_every_row_once_within_the_budget() -> None:
    lengths = {i: 1 + (i * 37) % 120 for i in range(50)}

    plan = plan_micro_batches(lengths, max_tokens=300)

    assert sorted(i for part in plan for i in part) == list(range(50))
    for part in plan:
        assert len(part) * padded_length(max(lengths[i] for i in part)) <= 300


def test_plan_fills_the_budget_without_padding() -> None:
    lengths = {0: 100, 1: 10, 2: 16, 3: 17, 4: 73}

    def plan(max_tokens: int | None = None, max_rows: int | None = None) -> list[list[int]]:
        return plan_micro_batches(lengths, max_tokens=max_tokens, max_rows=max_rows, padded=False)

    assert plan() == [[1, 2, 3, 4, 0]]
    assert plan(max_tokens=116) == [[1, 2, 3, 4], [0]]
    assert plan(max_tokens=115) == [[1, 2, 3], [4], [0]]
    assert plan(max_rows=2) == [[1, 2], [3, 4], [0]]
    assert plan_micro_batches({}, max_tokens=70, padded=False) == []
    with pytest.raises(DataError, match=r"row 0 has 100 tokens, which is more .* of 99"):
        plan(max_tokens=99)


def test_plan_rejects_a_row_beyond_the_budget() -> None:
    with pytest.raises(DataError, match=r"row 7 has 65 tokens \(80 padded\).*64"):
        plan_micro_batches({7: 65}, max_tokens=64)


def test_micro_batch_values() -> None:
    rows = [
        TrainRow(tokens=[5, 6, 7], loss_mask=[1.0, 0.0, 1.0]),
        TrainRow(tokens=[8, 9], loss_mask=[0.0, 0.5]),
    ]

    micro = build_micro_batch(
        train_batch(rows), [1, 0], pad_id=3, max_positions=10, device=torch.device("cpu")
    )

    assert micro.ids.shape == (2, 16)
    assert micro.ids[0].tolist() == [8, 9] + [3] * 14
    assert micro.ids[1].tolist() == [5, 6, 7] + [3] * 13
    # Token 0 has no context, so its mask is dropped. Mask weights are kept.
    assert micro.mask[0].tolist() == [0, 0.5] + [0] * 14
    assert micro.mask[1].tolist() == [0, 0, 1] + [0] * 13
    assert micro.target_slots.tolist() == [1, 18]
    assert micro.head_rows.tolist() == [0, 17] + [0] * 10
    assert micro.labels.tolist()[:2] == [9, 7]
    assert micro.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] + [9] * 6
    spread = micro.scatter(torch.tensor([1.5, 2.5]))
    assert spread.nonzero().tolist() == [[0, 1], [1, 2]]


def test_micro_batch_values_without_padding() -> None:
    rows = [
        TrainRow(tokens=[5, 6, 7], loss_mask=[1.0, 0.0, 1.0]),
        TrainRow(tokens=[8, 9], loss_mask=[0.0, 0.5]),
    ]

    micro = build_micro_batch(
        train_batch(rows),
        [1, 0],
        pad_id=3,
        max_positions=10,
        device=torch.device("cpu"),
        padded=False,
    )

    assert micro.ids.tolist() == [[8, 9, 5, 6, 7]]
    assert micro.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert micro.lengths == [2, 3]
    assert micro.starts == [0, 2]
    # The loss mask is padded anyway.
    assert micro.mask.shape == (2, 16)
    assert micro.mask.nonzero().tolist() == [[0, 1], [1, 2]]
    assert micro.head_rows.tolist() == [0, 3] + [0] * 10
    assert micro.labels.tolist()[:2] == [9, 7]
    spread = micro.scatter(torch.tensor([1.5, 2.5]))
    assert spread.nonzero().tolist() == [[0, 1], [1, 2]]


def test_number_of_head_rows_satisfies_the_row_rule() -> None:
    for length in range(3, 40):
        micro = build_micro_batch(
            make_batch([length]), [0], pad_id=0, max_positions=64, device=torch.device("cpu")
        )
        assert len(micro.head_rows) % 4 == 0
        assert len(micro.head_rows) >= 12
        assert len(micro.target_slots) == max(length - 3, 0)


def test_column_is_aligned_with_tokens() -> None:
    batch = train_batch([TrainRow(tokens=[1] * n, loss_mask=[1.0] * n) for n in (2, 3, 1)])
    like = torch.zeros(2, 4, dtype=torch.float64)
    values = torch.tensor([1.0, 2.0, 7.0, 8.0, 9.0, 3.0])

    out = column(values, batch, [2, 0], like)

    assert out is not None
    assert out.dtype == torch.float64
    assert out.tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]
    assert column(None, batch, [2, 0], like) is None


def test_check_batch_rejects_invalid_batches() -> None:
    limit = ContextLimit(4, "the model is short")

    def refuse(row: TrainRow, match: str, others: list[TrainRow] | None = None) -> None:
        with pytest.raises(DataError, match=match):
            check_batch(train_batch([*(others or []), row]), vocab_size=10, limit=limit)

    ok = TrainRow(tokens=[1, 2], loss_mask=[0, 1])
    check_batch(train_batch([ok]), vocab_size=10, limit=limit)
    refuse(TrainRow(tokens=[1, 2], loss_mask=[1, 0]), "no target token")
    refuse(TrainRow(tokens=[1, 2], loss_mask=[0, 1, 1]), "loss_mask has 3 entries for 2 tokens")
    refuse(TrainRow(tokens=[1, 10], loss_mask=[0, 1]), r"ids from 1 to 10.*0 \.\. 9")
    refuse(TrainRow(tokens=[1, -1], loss_mask=[0, 1]), "ids from -1 to 1")
    refuse(TrainRow(tokens=[1] * 5, loss_mask=[1] * 5), "has 5 tokens, but the model is short; ")
    refuse(TrainRow(tokens=[], loss_mask=[]), "no tokens", [ok])
    refuse(
        TrainRow(tokens=[1, 2], loss_mask=[0, 1], advantages=[1, 1]),
        "row 0 has no advantages",
        [ok],
    )
    refuse(
        TrainRow(tokens=[1, 2], loss_mask=[0, 1], old_log_probs=[-1.0]),
        "old_log_probs has 1 entries",
    )


def test_rows_of_a_group_follow_each_other() -> None:
    lengths, groups = {0: 5, 1: 9, 2: 4, 3: 2, 4: 6}, {0: 1, 1: 0, 2: 0, 3: 1, 4: 2}
    plan = plan_micro_batches(lengths, max_tokens=13, padded=False, groups=groups)
    assert plan == [[3, 0, 4], [2, 1]]
    assert plan_micro_batches(lengths, max_tokens=13, padded=False) == [[3, 2, 0], [4], [1]]


def test_rows_with_the_same_prompt_share_it() -> None:
    rows = [
        TrainRow(tokens=[7, 8, 1, 2], loss_mask=[0, 0, 1, 1]),
        TrainRow(tokens=[7, 8, 9, 3], loss_mask=[0, 0, 0, 1]),
        TrainRow(tokens=[7, 8, 4], loss_mask=[0, 0, 1]),
        # A target in the first place does not count, so the prompt is a single token.
        TrainRow(tokens=[7, 8], loss_mask=[1, 1]),
    ]
    batch = train_batch(rows)
    assert [prompt_length(batch, i) for i in range(4)] == [2, 3, 2, 1]
    # 2 of 13 tokens would be saved, and 2 of 7.
    assert prompt_groups(batch, range(4)) is None
    assert prompt_groups(batch, [0, 2]) == {0: 0, 2: 0}
    groups = {0: 0, 1: 1, 2: 0, 3: 2}

    def shared(indices: list[int]) -> SharedRows | None:
        return build_micro_batch(
            batch,
            indices,
            pad_id=0,
            max_positions=64,
            device=torch.device("cpu"),
            padded=False,
            groups=groups,
        ).shared

    assert shared([0, 2]) == SharedRows([(0, 0, 4), (4, 6, 1)], [(0, 4, 2)])
    assert shared([0, 1, 2]) is None
    assert shared([1, 2, 3]) is None
