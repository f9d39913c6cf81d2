"""Ragged columns: values by hand, parts of a batch, and what travels to another process."""

from __future__ import annotations

import pickle
from array import array

import pytest
import torch

from slipstream.errors import DataError
from slipstream.training.columns import (
    any_of_rows,
    padded,
    select_rows,
    train_batch,
    unpadded,
)
from slipstream.training.step import batch_normalizers
from slipstream.types import NoiseKey, TrainBatch, TrainRow
from tests.training.helpers import as_rows

ROWS = [
    TrainRow(
        tokens=[5, 6, 7],
        loss_mask=[1.0, 0.0, 1.0],
        advantages=[0.5, 1.5, 2.5],
        old_log_probs=[-1.0, -2.0, -3.0],
        kept_ids=[array("i"), array("i", [6]), array("i", [7, 8])],
        uid="a",
        key=NoiseKey(seed=1, uid="a"),
    ),
    TrainRow(
        tokens=[8],
        loss_mask=[1.0],
        advantages=[3.5],
        old_log_probs=[-4.0],
        kept_ids=[array("i")],
        uid="b",
    ),
    TrainRow(
        tokens=[9, 10],
        loss_mask=[0.0, 0.5],
        advantages=[4.5, 5.5],
        old_log_probs=[-5.0, -6.0],
        kept_ids=[array("i"), array("i", [10])],
        uid="c",
    ),
]


def batch() -> TrainBatch:
    return train_batch(ROWS, temperature=0.7)


def test_columns_have_one_row_after_another() -> None:
    made = batch()
    assert made.starts == [0, 3, 4, 6]
    assert made.lengths == [3, 1, 2]
    assert made.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert made.tokens.dtype == torch.int64
    assert made.loss_mask.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]
    assert made.loss_mask.dtype == torch.float32
    assert made.advantages is not None
    assert made.advantages.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert made.has_old_log_probs is None
    assert made.returns is None
    # The first token of a row is never a target, whatever its weight.
    assert made.targets.tolist() == [False, False, True, False, False, True]
    assert (len(made), made.num_tokens, made.num_target_tokens) == (3, 6, 2)
    assert as_rows(made) == ROWS


def test_a_loss_mask_keeps_weights_that_float32_has_not() -> None:
    rows = [TrainRow(tokens=[1] * 4, loss_mask=[0.0, 0.1, 0.1, 0.1])] * 2
    made = train_batch(rows)
    assert made.loss_mask.tolist() == [0.0, 0.1, 0.1, 0.1] * 2
    # As Python's sum of the lists, to the last bit.
    assert batch_normalizers(made).num_tokens == sum(sum(row.loss_mask[1:]) for row in rows)
    assert batch_normalizers(made).num_tokens != 0.6


@pytest.mark.parametrize("chosen", [[0, 1, 2], [1, 2], [2, 0], [1], [0, 0, 2], []])
def test_chosen_rows_are_those_of_the_lists(chosen: list[int]) -> None:
    part = select_rows(batch(), chosen)
    assert as_rows(part) == [ROWS[i] for i in chosen]
    assert part.temperature == 0.7
    assert part.starts[0] == 0


def test_successive_rows_share_memory_and_change_nothing_of_the_whole() -> None:
    whole = batch()
    part = select_rows(whole, [1, 2])
    assert part.tokens.data_ptr() == whole.tokens[3:].data_ptr()
    # Each mini-batch may have a loss mask of its own.
    for one in (part, select_rows(whole, [0, 1, 2])):
        one.loss_mask = torch.zeros_like(one.loss_mask)
    assert whole.loss_mask.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]


def test_a_part_travels_without_the_rest() -> None:
    rows = [TrainRow(tokens=[n] * 1000, loss_mask=[1.0] * 1000) for n in range(50)]
    whole = train_batch(rows)
    whole.old_log_probs = whole.rollout_log_probs = torch.arange(50_000.0)
    part = select_rows(whole, [7])
    sent = pickle.dumps(part)
    # 8 bytes of ids, 4 of the mask, and 4 of both log-probs, which are one column.
    assert 16_000 <= len(sent) < 18_000
    back = pickle.loads(sent)
    assert as_rows(back) == as_rows(part)
    assert back.old_log_probs[0] == 7000.0


def test_rows_may_lack_old_log_probs_alone() -> None:
    rows = as_rows(batch())
    rows[1].old_log_probs = None
    made = train_batch(rows)
    assert made.has_old_log_probs is not None
    assert made.has_old_log_probs.tolist() == [True, False, True]
    assert as_rows(made) == rows
    assert as_rows(select_rows(made, [1, 2])) == rows[1:]
    rows[2].kept_ids = None
    with pytest.raises(DataError, match="row 2 has no kept_ids, but other rows"):
        train_batch(rows)


def test_padding_and_back() -> None:
    starts = [0, 3, 3, 4]
    wide = padded(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), starts)
    assert wide.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert wide.dtype == torch.float32
    assert unpadded(wide, starts).tolist() == [1, 2, 3, 4]
    ids = padded(torch.tensor([1, 2**40, 3, 4]), starts, dtype=torch.int64)
    assert ids[0].tolist() == [1, 2**40, 3]
    assert any_of_rows(torch.tensor([False, True, False, False]), starts) == [True, False, False]
