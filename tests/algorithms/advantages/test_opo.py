"""OPO's length-weighted baseline against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.algorithms.advantages.helpers import estimate, per_row, plain


def test_opo_baseline_is_weighted_by_length() -> None:
    # Lengths 3 and 1: baseline (3 * 1 + 1 * 0) / 4.
    case = replace(plain([1.0, 0.0], "aa"), mask=[[1, 1, 1], [1, 0, 0]])
    advantages, returns = estimate("opo", case)
    assert advantages.tolist() == [[0.25] * 3, [-0.75, 0.0, 0.0]]
    assert torch.equal(advantages, returns)


def test_opo_counts_target_tokens_and_not_positions() -> None:
    case = replace(plain([1.0, 0.0], "aa"), mask=[[1, 1, 1], [0, 0, 1]])
    assert estimate("opo", case)[0].tolist() == [[0.25] * 3, [0.0, 0.0, -0.75]]


def test_opo_keeps_the_raw_score_of_a_group_of_one() -> None:
    assert per_row("opo", plain([0.7, 1.0, 0.0], "abb")) == pytest.approx([0.7, 0.5, -0.5])


def test_empty_response_has_no_weight_in_the_baseline() -> None:
    case = replace(plain([3.0, 1.0, 0.0], "aaa"), mask=[[0, 0, 0], [1, 1, 1], [1, 1, 1]])
    advantages, _ = estimate("opo", case)
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 0.5, -0.5])
