"""Group statistics: exact zeros, grouping by key, and rejected input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import group_scores
from tests.algorithms.advantages.helpers import estimate, per_row, plain


def test_group_statistics() -> None:
    keys: list[tuple[str, int] | int] = [("p", 1), ("p", 1), 7]
    group = group_scores(torch.tensor([1.0, 3.0, 2.0]), keys)
    assert group.count.tolist() == [2.0, 2.0, 1.0]
    assert group.centered.tolist() == [-1.0, 1.0, 0.0]
    assert group.std.tolist() == pytest.approx([2**0.5, 2**0.5, 0.0])
    assert group.slot.tolist() == [0, 0, 1]
    assert group.total(torch.tensor([5.0, 6.0, 7.0])).tolist() == [11.0, 11.0, 7.0]
    assert isinstance(group.score, Tensor)


def test_tensor_keys_group_by_value() -> None:
    group = group_scores(torch.tensor([1.0, 3.0]), torch.tensor([4, 4]))
    assert group.count.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "gpg",
        "opo",
        "reinforce_plus_plus_baseline",
        "gdpo",
    ],
)
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.3, 1e6])
def test_equal_scores_give_exactly_zero(name: str, score: float) -> None:
    assert per_row(name, plain([score] * 7, "aaaaaaa")) == [0.0] * 7


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_equal_float32_scores_give_exactly_zero_too(name: str) -> None:
    advantages, _ = estimate(name, plain([0.1] * 7, "aaaaaaa"), torch.float32)
    assert not advantages.any()


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "gpg"])
def test_rows_are_grouped_by_key_and_not_by_position(name: str) -> None:
    grouped = per_row(name, plain([1.0, 0.0, 5.0, 3.0, 4.0], "aabbb"))
    mixed = per_row(name, plain([5.0, 1.0, 3.0, 0.0, 4.0], "babab"))
    assert mixed == pytest.approx([grouped[i] for i in (2, 0, 3, 1, 4)])


def test_large_offsets_keep_small_differences() -> None:
    group = group_scores(torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64), "aaa")
    assert group.centered.tolist() == [-1.0, 0.0, 1.0]
    assert group.std.tolist() == [1.0, 1.0, 1.0]


def test_empty_response_counts_in_its_group() -> None:
    # Its reward is at a masked position. Both rows differ from the mean, but only one has tokens.
    advantages, _ = estimate(
        "grpo", plain([1.0, 0.0], "aa"), response_mask=torch.tensor([[0, 0, 0], [1, 1, 1]])
    )
    assert advantages[0].tolist() == [0.0] * 3
    assert advantages[1].tolist() == pytest.approx([-(2**-0.5)] * 3, abs=1e-5)


def test_mask_weights_do_not_scale_the_advantage() -> None:
    advantages, _ = estimate(
        "rloo", plain([1.0, 0.0], "aa"), response_mask=torch.tensor([[0.5, 0.0, 2.0], [1, 1, 1]])
    )
    assert advantages.tolist() == [[1.0, 0.0, 1.0], [-1.0, -1.0, -1.0]]


def test_rejects_invalid_input() -> None:
    with pytest.raises(ValueError, match="1 keys for scores of shape"):
        group_scores(torch.zeros(2), ["a"])
    with pytest.raises(ValueError, match="score of row 1 is nan"):
        group_scores(torch.tensor([0.0, float("nan")]), ["a", "a"])
