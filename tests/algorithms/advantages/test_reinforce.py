"""REINFORCE++ against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.algorithms.advantages.helpers import estimate, per_row, plain


def test_reinforce_plus_plus_values() -> None:
    # Returns 0.25, 0.5, 1 and 0, 0, 0; mean 1.75 / 6.
    case = replace(plain([1.0, 0.0], "aa"), gamma=0.5)
    advantages, returns = estimate("reinforce_plus_plus", case)
    assert returns.tolist() == [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0]]
    mean = 1.75 / 6
    var = (0.25**2 + 0.5**2 + 1 - 6 * mean**2) / 5
    assert advantages[0, 2].item() == pytest.approx((1 - mean) / (var + 1e-8) ** 0.5)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-12)


def test_masked_spans_are_skipped_without_discount() -> None:
    case = replace(plain([1.0, 0.0], "aa"), gamma=0.5, mask=[[1, 0, 1], [1, 1, 1]])
    _, returns = estimate("reinforce_plus_plus", case)
    assert returns.tolist() == [[0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_reinforce_plus_plus_does_not_compare_within_groups() -> None:
    case = plain([1.0, 0.0, 5.0, 3.0], "aabb")
    mixed = replace(case, index=list("abab"))
    for a, b in zip(
        estimate("reinforce_plus_plus", case), estimate("reinforce_plus_plus", mixed), strict=True
    ):
        assert torch.equal(a, b)


def test_reinforce_plus_plus_baseline_values() -> None:
    # Centered -1, 1, -2, 2 over three tokens each: mean 0, variance 3 * 10 / 11.
    out = per_row("reinforce_plus_plus_baseline", plain([0.0, 2.0, 1.0, 5.0], "aabb"))
    scale = (30 / 11 + 1e-8) ** 0.5
    assert out == pytest.approx([-1 / scale, 1 / scale, -2 / scale, 2 / scale])


def test_reinforce_plus_plus_baseline_whitens_over_tokens_and_not_over_rows() -> None:
    # Centered 1 on three tokens and -1 on one: mean 0.5, variance (3 * 0.25 + 2.25) / 3 = 1.
    case = replace(plain([2.0, 0.0], "aa"), mask=[[1, 1, 1], [1, 0, 0]])
    advantages, _ = estimate("reinforce_plus_plus_baseline", case)
    assert advantages[0].tolist() == pytest.approx([0.5] * 3)
    assert advantages[1].tolist() == pytest.approx([-1.5, 0.0, 0.0])


def test_group_of_one_has_its_raw_score_before_whitening() -> None:
    # Values 4, -1 and 1: mean 4 / 3, variance 3 * (64 + 49 + 1) / 9 / 8 = 4.75.
    out = per_row("reinforce_plus_plus_baseline", plain([4.0, 0.0, 2.0], "abb"))
    scale = (4.75 + 1e-8) ** 0.5
    assert out == pytest.approx([8 / 3 / scale, -7 / 3 / scale, -1 / 3 / scale])
