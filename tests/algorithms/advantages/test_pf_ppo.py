"""PF-PPO: weights and sampling of rows."""

from __future__ import annotations

import pytest
import torch

from slipstream.algorithms import PFPPOConfig, pf_ppo_indices, pf_ppo_weights

SCORES = torch.tensor([2.0, -1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PFPPOConfig(), [4.0, 1.0, 0.25, 4.0]),
        (PFPPOConfig(weight_pow=1.0), [2.0, 1.0, 0.5, 2.0]),
        (PFPPOConfig(reweight_method="max_min"), [1.0, 1.0, 0.0, 1.0]),
        (PFPPOConfig(reweight_method="max_random"), [0.4, 0.1, 0.1, 0.4]),
    ],
)
def test_weights_of_each_method(config: PFPPOConfig, expected: list[float]) -> None:
    assert pf_ppo_weights(SCORES, config).tolist() == [w + 1e-8 for w in expected]


def test_rows_are_sampled_by_weight_with_replacement() -> None:
    scores = torch.tensor([1.0, 0.0, 3.0, 0.0]).repeat(2000)
    drawn = pf_ppo_indices(scores, PFPPOConfig(weight_pow=1.0), seed=0)
    kinds = torch.bincount(drawn % 4, minlength=4) / len(drawn)
    assert drawn.shape == (8000,)
    assert len(set(drawn.tolist())) < 4000
    assert kinds.tolist() == pytest.approx([0.25, 0.0, 0.75, 0.0], abs=0.02)


def test_sampling_depends_only_on_the_seed() -> None:
    first = pf_ppo_indices(SCORES, seed=3)
    assert torch.equal(first, pf_ppo_indices(SCORES, seed=3))
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(first, pf_ppo_indices(SCORES, generator=generator))
    assert any(not torch.equal(first, pf_ppo_indices(SCORES, seed=seed)) for seed in range(4, 9))


def test_batch_of_zero_scores_can_be_sampled() -> None:
    assert set(pf_ppo_indices(torch.zeros(50), seed=0).tolist()) <= set(range(50))


def test_rejects_invalid_input() -> None:
    with pytest.raises(ValueError, match="score of row 0 is nan"):
        pf_ppo_weights(torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match=r"scores of shape \(0,\)"):
        pf_ppo_weights(torch.zeros(0))
    for both in ({}, {"seed": 1, "generator": torch.Generator()}):
        with pytest.raises(ValueError, match="pass either seed or generator"):
            pf_ppo_indices(SCORES, **both)  # type: ignore[arg-type]
