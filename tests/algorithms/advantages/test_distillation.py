"""On-policy distillation against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.algorithms.advantages.helpers import estimate, plain


def test_advantage_is_minus_the_reverse_kl_of_the_token() -> None:
    case = replace(
        plain([5.0, 7.0], "aa", length=2),
        old_log_probs=[[-1.0, -2.0], [-0.5, -1.0]],
        ref_log_probs=[[-3.0, -0.5], [-0.5, -4.0]],
        mask=[[1, 1], [1, 0]],
    )
    advantages, returns = estimate("on_policy_distillation", case)
    # Rewards and groups do not matter.
    assert advantages.tolist() == [[-2.0, 1.5], [0.0, 0.0]]
    assert torch.equal(advantages, returns)
