"""verl's functions of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.compat.verl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def rows(count: int) -> DataProto:
    return DataProto(
        {"x": torch.arange(count)}, {"name": [f"r{i}" for i in range(count)]}, {"step": 1}
    )


@pytest.mark.parametrize(
    ("count", "divisor", "expected", "added"),
    [
        (5, 4, [0, 1, 2, 3, 4, 0, 1, 2], 3),
        (2, 7, [0, 1, 0, 1, 0, 1, 0], 5),
        (1, 3, [0, 0, 0], 2),
        (4, 2, [0, 1, 2, 3], 0),
        (3, 1, [0, 1, 2], 0),
    ],
)
def test_padding_to_a_divisor_repeats_the_first_rows(
    count: int, divisor: int, expected: list[int], added: int
) -> None:
    padded, pad_size = pad_dataproto_to_divisor(rows(count), divisor)
    assert (padded.batch["x"].tolist(), pad_size) == (expected, added)
    assert padded.non_tensor_batch["name"].tolist() == [f"r{i}" for i in expected]
    assert padded.meta_info == {"step": 1}
    assert unpad_dataproto(padded, pad_size).batch["x"].tolist() == list(range(count))


def test_padding_of_no_rows_warns(caplog: pytest.LogCaptureFixture) -> None:
    empty = DataProto()
    assert pad_dataproto_to_divisor(empty, 4) == (empty, 0)
    assert "without rows was not padded" in caplog.text
    with pytest.raises(ValueError, match="size_divisor must be at least 1, got 0"):
        pad_dataproto_to_divisor(rows(1), 0)


def test_folding_groups_rows_and_unfolding_undoes_it() -> None:
    data = DataProto({"x": torch.arange(12).reshape(6, 2)}, {"name": list("abcdef")}, {"step": 1})
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3
    assert folded.batch["x"].shape == (3, 2, 2)
    assert folded.batch["x"][1].tolist() == [[4, 5], [6, 7]]
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert folded.meta_info == {"step": 1}
    again = unfold_batch_dim(folded)
    assert torch.equal(again.batch["x"], data.batch["x"])
    assert again.non_tensor_batch["name"].tolist() == list("abcdef")
    with pytest.raises(ValueError, match="6 rows cannot be folded into 4 equal rows"):
        fold_batch_dim(data, 4)


def test_unions_of_mappings_add_to_the_first() -> None:
    one = {"x": torch.tensor([1, 2])}
    assert union_tensor_dict(one, {"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])}) is one
    assert one["y"].tolist() == [3, 4]
    with pytest.raises(ValueError, match="'x', but its values differ"):
        union_tensor_dict(one, {"x": torch.tensor([1, 3])})
    with pytest.raises(ValueError, match=r"different numbers of rows: \[2, 3\]"):
        union_tensor_dict(one, {"z": torch.zeros(3)})
    nan = np.array([float("nan"), 1.0])
    arrays = {"s": nan}
    assert union_numpy_dict(arrays, {"s": nan.copy(), "t": nan})["t"] is nan
    with pytest.raises(ValueError, match="'s', but its values differ"):
        union_numpy_dict(arrays, {"s": np.array([0.0, 1.0])})


def test_lists_of_mappings() -> None:
    assert list_of_dict_to_dict_of_list([]) == {}
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}]) == {"a": [1, 3], "b": [2]}
    with pytest.raises(ValueError, match="'b' is not in the first of 2 mappings"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2, "b": 3}])


def test_rows_are_collated_to_a_batch() -> None:
    data = rows(3)
    batch = collate_fn([data[2], data[0]])
    assert batch.batch["x"].tolist() == [2, 0]
    assert batch.non_tensor_batch["name"].tolist() == ["r2", "r0"]
    assert batch.meta_info == {}
