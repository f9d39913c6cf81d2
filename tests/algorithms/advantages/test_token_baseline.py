"""Optimal token baselines against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.algorithms.advantages.helpers import estimate, plain

OTB, TIR = "optimal_token_baseline", "tir_optimal_token_baseline"
# With pi = 0.5 and sum of squares 0.5 each token adds 0.5; tokens of the second row add 1.5.
CASE = replace(
    plain([1.0, 0.0], "aa", length=2),
    old_log_probs=[[math.log(0.5)] * 2] * 2,
    sum_pi_squared=[[0.5, 0.5], [1.5, 1.5]],
)


@pytest.mark.parametrize("name", [OTB, TIR])
def test_baseline_values(name: str) -> None:
    # Energies 0.5, 1 and 1.5, 3: the baseline is 0.5 / 2 = 1 / 4 = 0.25.
    advantages, returns = estimate(name, CASE)
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    torch.testing.assert_close(
        advantages, torch.tensor([[0.75, 0.75], [-0.25, -0.25]], dtype=torch.float64)
    )


@pytest.mark.parametrize("name", [OTB, TIR])
def test_importance_weights_are_squared(name: str) -> None:
    # The first row's energies times 9: 4.5 / 6 and 9 / 12.
    weights = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
    advantages, _ = estimate(name, CASE, rollout_is_weights=weights)
    assert advantages[0].tolist() == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("name", [OTB, TIR])
def test_tail_of_the_single_longest_response_has_no_baseline(name: str) -> None:
    advantages, _ = estimate(name, replace(CASE, mask=[[1, 1], [1, 0]]))
    assert advantages[0].tolist() == pytest.approx([0.75, 1.0])
    assert advantages[1].tolist() == pytest.approx([-0.25, 0.0])


@pytest.mark.parametrize("name", [OTB, TIR])
def test_group_of_one_has_no_baseline(name: str) -> None:
    advantages, returns = estimate(name, replace(CASE, index=["a", "b"]))
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize("name", [OTB, TIR])
def test_certain_tokens_have_no_baseline(name: str) -> None:
    # With pi = 1 there is no gradient and no weight; there must be no division by zero.
    ones = [[1.0, 1.0]] * 2
    case = replace(CASE, old_log_probs=[[0.0, 0.0]] * 2, sum_pi_squared=ones)
    advantages, returns = estimate(name, case)
    assert torch.equal(advantages, returns)


def test_tir_aligns_by_target_token_and_not_by_position() -> None:
    gap = replace(
        CASE,
        rewards=[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]],
        mask=[[1, 0, 1], [1, 1, 0]],
        old_log_probs=[[math.log(0.5)] * 3] * 2,
        sum_pi_squared=[[0.5] * 3, [1.5] * 3],
    )
    advantages, _ = estimate(TIR, gap)
    assert advantages[0].tolist() == pytest.approx([0.75, 0.0, 0.75])
    assert advantages[1].tolist() == pytest.approx([-0.25, -0.25, 0.0])
    # By position, neither has a partner for its second token.
    advantages, _ = estimate(OTB, gap)
    assert advantages[0].tolist() == pytest.approx([0.75, 0.0, 1.0])
    assert advantages[1].tolist() == pytest.approx([-0.25, 0.0, 0.0])


@pytest.mark.parametrize("name", [OTB, TIR])
def test_rejects_inputs_that_are_not_finite(name: str) -> None:
    with pytest.raises(ValueError, match="sum_pi_squared of row 1 is nan at token 0"):
        estimate(name, replace(CASE, sum_pi_squared=[[0.5, 0.5], [float("nan"), 0.5]]))
