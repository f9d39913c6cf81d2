"""Aggregation: values of all modes, and independence of the split into micro-batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import (
    LossAggMode,
    Normalizers,
    agg_loss,
    masked_mean,
    masked_sum,
    sum_loss,
)
from slipstream.algorithms.aggregation import counted

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (6 + 5) / 4),
        ("token-sum", 6 + 5),
        ("seq-mean-token-sum", (6 + 5) / 2),
        ("seq-mean-token-mean", (6 / 3 + 5 / 1) / 2),
        ("seq-mean-token-sum-norm", (6 + 5) / (2 * 3)),
    ],
)
def test_values_of_all_modes(mode: str, expected: float) -> None:
    assert float(agg_loss(LOSS, MASK, mode)) == pytest.approx(expected)


def test_horizon_replaces_the_padded_length() -> None:
    out = agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert float(out) == pytest.approx(11 / (2 * 10))
    padded = torch.nn.functional.pad(LOSS, (0, 5)), torch.nn.functional.pad(MASK, (0, 5))
    again = agg_loss(*padded, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert float(again) == pytest.approx(11 / (2 * 10))


def test_global_counts_replace_the_counts_of_the_rows() -> None:
    mean = agg_loss(LOSS, MASK, "token-mean", batch_num_tokens=22)
    assert float(mean) == pytest.approx(11 / 22)
    seq = agg_loss(LOSS, MASK, "seq-mean-token-sum", global_batch_size=11, batch_num_tokens=22)
    assert float(seq) == pytest.approx(1.0)


def test_rows_without_targets_do_not_count_as_sequences() -> None:
    assert Normalizers.from_mask(MASK) == Normalizers(num_tokens=4, num_sequences=2, horizon=3)


def test_unknown_mode_error_lists_the_known_modes() -> None:
    with pytest.raises(ValueError, match="'mean'; known: token-mean, token-sum, seq-mean-token"):
        agg_loss(LOSS, MASK, "mean")


def test_rejects_empty_masks() -> None:
    with pytest.raises(ValueError, match="num_tokens of a mini-batch must be > 0, got 0"):
        Normalizers.from_mask(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="empty mask"):
        masked_mean(LOSS, torch.zeros_like(LOSS))


def test_empty_micro_batch_adds_zero() -> None:
    norm = Normalizers.from_mask(MASK)
    for mode in LossAggMode:
        assert float(sum_loss(LOSS[2:], MASK[2:], mode, norm)) == 0.0


def test_masked_values_are_ignored() -> None:
    values = torch.tensor([[1.0, float("nan"), float("inf")]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 0.0]])
    assert masked_sum(values, mask).item() == 1.0
    torch.autograd.backward(agg_loss(values, mask, "seq-mean-token-mean"))
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]


def reference(loss: Tensor, mask: Tensor, mode: str, horizon: float) -> Tensor:
    """The definitions, computed with loops in float64."""
    rows = [
        [loss[i, t] for t in range(loss.shape[1]) if mask[i, t]]
        for i in range(loss.shape[0])
        if mask[i].any()
    ]
    sums = torch.stack([torch.stack(row).sum() for row in rows])
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.float64)
    if mode == "token-mean":
        return sums.sum() / lengths.sum()
    if mode == "token-sum":
        return sums.sum()
    if mode == "seq-mean-token-sum":
        return sums.mean()
    if mode == "seq-mean-token-mean":
        return (sums / lengths).mean()
    assert mode == "seq-mean-token-sum-norm"
    return (sums / horizon).mean()


@settings(deadline=None, max_examples=80)
@given(data=st.data(), mode=st.sampled_from(list(LossAggMode)))
def test_loss_and_gradient_do_not_depend_on_the_split(
    data: st.DataObject, mode: LossAggMode
) -> None:
    n_rows = data.draw(st.integers(1, 7))
    n_tokens = data.draw(st.integers(1, 5))
    bits = st.lists(st.integers(0, 1), min_size=n_rows * n_tokens, max_size=n_rows * n_tokens)
    mask = torch.tensor(data.draw(bits), dtype=torch.float64).reshape(n_rows, n_tokens)
    if not mask.any():
        mask[0, 0] = 1
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n_rows, n_tokens, generator=generator, dtype=torch.float64)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, n_rows)))), n_rows]
    horizon = data.draw(st.sampled_from([None, 3.0, 17.0]))

    expected_leaf = values.clone().requires_grad_()
    expected = reference(expected_leaf, mask, mode, horizon or n_tokens)
    torch.autograd.backward(expected)

    # Float32 like real losses; micro-batches of any rows, trimmed to their longest row.
    leaf = values.float().requires_grad_()
    norm = Normalizers.from_mask(mask, horizon=horizon)
    total = 0.0
    for start, end in itertools.pairwise(cuts):
        if start == end:
            continue
        used = int(mask[start:end].any(dim=0).nonzero().max()) + 1 if mask[start:end].any() else 1
        part = sum_loss(leaf[start:end, :used], mask[start:end, :used].float(), mode, norm)
        torch.autograd.backward(part)
        total += part.item()

    assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    assert leaf.grad is not None
    assert expected_leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected_leaf.grad, rtol=1e-6, atol=1e-7)


# VERL's rules: a mode needs only the counts of its own definition, and every mode is multiplied by
# dp_size. In MASK are 4 tokens and 2 rows with tokens; the horizon is 3.
NEEDS = {
    "token-mean": ({"batch_num_tokens": 8}, 4 * 11 / 8),
    "token-sum": ({}, 4 * 11),
    "seq-mean-token-sum": ({"global_batch_size": 5}, 4 * 11 / 5),
    "seq-mean-token-mean": ({"global_batch_size": 5}, 4 * (6 / 3 + 5) / 5),
    "seq-mean-token-sum-norm": ({"global_batch_size": 5}, 4 * 11 / (5 * 3)),
}


@pytest.mark.parametrize("mode", NEEDS)
def test_with_several_ranks_a_mode_needs_only_the_counts_that_it_divides_by(mode: str) -> None:
    needed, expected = NEEDS[mode]
    assert float(agg_loss(LOSS, MASK, mode, dp_size=4, **needed)) == pytest.approx(expected)
    every = {"batch_num_tokens": 8, "global_batch_size": 5}
    assert float(agg_loss(LOSS, MASK, mode, 4, **every)) == pytest.approx(expected)
    tensors: dict[str, Any] = {key: torch.tensor(value) for key, value in needed.items()}
    assert float(agg_loss(LOSS, MASK, mode, 4, **tensors)) == pytest.approx(expected)
    for missing in needed:
        others = {key: value for key, value in every.items() if key != missing}
        with pytest.raises(ValueError, match=f"with dp_size=4 .*pass the mini-batch's {missing}"):
            agg_loss(LOSS, MASK, mode, dp_size=4, **others)


@pytest.mark.parametrize("mode", NEEDS)
def test_a_micro_batch_without_targets_adds_zero_if_the_counts_are_given(mode: str) -> None:
    needed, _ = NEEDS[mode]
    leaf = LOSS.clone().requires_grad_()
    loss = agg_loss(leaf, torch.zeros_like(MASK), mode, **needed)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert leaf.grad is not None
    assert not leaf.grad.any()
    if needed:
        with pytest.raises(ValueError, match=r"must be > 0, got 0\.0"):
            agg_loss(LOSS, torch.zeros_like(MASK), mode)


def test_the_horizon_is_read_by_one_mode_only() -> None:
    for mode in LossAggMode:
        plain = float(agg_loss(LOSS, MASK, mode))
        scaled = float(agg_loss(LOSS, MASK, mode, loss_scale_factor=6))
        assert scaled == pytest.approx(plain / 2 if mode.endswith("norm") else plain)


def test_the_trainers_counts_replace_missing_ones() -> None:
    norm = Normalizers(num_tokens=8, num_sequences=5, horizon=10)
    expected = {
        "token-mean": 11 / 8,
        "token-sum": 11,
        "seq-mean-token-sum": 11 / 5,
        "seq-mean-token-mean": 7 / 5,
        "seq-mean-token-sum-norm": 11 / 50,
    }
    with counted(norm):
        values = {mode.value: float(agg_loss(LOSS, MASK, mode)) for mode in LossAggMode}
        assert values == pytest.approx(expected)
        assert float(agg_loss(LOSS, MASK, "token-mean", 3)) == pytest.approx(3 * 11 / 8)
        assert float(agg_loss(LOSS, MASK, "token-mean", batch_num_tokens=2)) == 5.5


def test_ranks_must_be_positive() -> None:
    with pytest.raises(ValueError, match="dp_size must be at least 1, got 0"):
        agg_loss(LOSS, MASK, "token-sum", dp_size=0)
