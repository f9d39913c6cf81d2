"""Settings of losses and advantages: access as in VERL, and rejected values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from slipstream.algorithms import (
    AdvantageConfig,
    Normalizers,
    PFPPOConfig,
    PolicyLossConfig,
    PolicyLossModeConfig,
    agg_loss,
)


def test_settings_support_verls_access() -> None:
    config = PolicyLossConfig(policy_loss=PolicyLossModeConfig(ppo_kl_coef=0.3))
    assert (config.clip_ratio, config.clip_ratio_c, config.tau_pos, config.tau_neg) == (
        0.2,
        3.0,
        1.0,
        1.05,
    )
    assert config.get("clip_ratio_c", 20.0) == 3.0
    assert config.get("no_such_setting", 7) == 7
    assert config["clip_ratio"] == 0.2
    assert config.policy_loss.get("ppo_kl_coef", 1.0) == 0.3
    assert config.policy_loss.clip_cov_lb == 1.0
    with pytest.raises(KeyError, match="no_such_setting"):
        config["no_such_setting"]


def test_loss_written_for_verl_gets_the_mini_batch_counts() -> None:
    loss, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    alone = PolicyLossConfig(loss_scale_factor=4.0)
    norm = Normalizers(num_tokens=6, num_sequences=4, horizon=5)
    config = PolicyLossConfig(normalizers=norm)

    def mean(config: PolicyLossConfig, mode: str) -> float:
        info: dict[str, Any] = config.global_batch_info
        return float(agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode=mode, **info))

    assert mean(alone, "token-mean") == pytest.approx(7 / 3)
    assert mean(alone, "seq-mean-token-sum-norm") == pytest.approx(7 / 2 / 4)
    assert mean(config, "token-mean") == pytest.approx(7 / 6)
    assert mean(config, "seq-mean-token-sum-norm") == pytest.approx(7 / 4 / 5)


def test_settings_with_tensors_can_be_compared_and_replaced() -> None:
    config = PolicyLossConfig()
    chosen = dataclasses.replace(config, selected=torch.ones(2, 2, dtype=torch.bool))
    assert chosen == config
    assert hash(chosen) == hash(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_ratio": -0.2}, r"clip_ratio must be >= 0, got -0\.2.* usual value is 0\.2"),
        ({"clip_ratio_low": -0.1}, r"clip_ratio_low must be >= 0, got -0\.1"),
        ({"clip_ratio_high": math.nan}, "clip_ratio_high must be >= 0, got nan"),
        ({"clip_ratio_c": 1.0}, r"clip_ratio_c must be > 1, got 1"),
        ({"tau_pos": 0.0}, r"tau_pos must be > 0, got 0\.0"),
        ({"tau_neg": -1.0}, r"tau_neg must be > 0, got -1\.0"),
        ({"loss_scale_factor": 0.0}, r"loss_scale_factor must be > 0, got 0\.0"),
    ],
)
def test_rejects_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_cov_lb": 5.0, "clip_cov_ub": 1.0}, r"clip_cov_lb=5\.0 must be below .*ub=1\.0"),
        ({"clip_cov_ratio": 0.0}, r"policy_loss\.clip_cov_ratio is a share .* got 0\.0"),
        ({"kl_cov_ratio": 1.5}, r"policy_loss\.kl_cov_ratio is a share .* got 1\.5"),
        ({"ppo_kl_coef": -1.0}, r"policy_loss\.ppo_kl_coef must be >= 0, got -1\.0"),
        ({"dro_beta": 0.0}, r"policy_loss\.dro_beta must be > 0, got 0\.0"),
        ({"loss_type": "clip"}, r"loss_type must be one of ppo_clip, reinforce, got 'clip'"),
    ],
)
def test_rejects_impossible_settings_of_a_mode(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossModeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, r"algorithm\.gamma must be in \[0, 1\], got 1\.5"),
        ({"lam": -0.1}, r"algorithm\.lam must be in \[0, 1\], got -0\.1"),
        ({"lam": float("nan")}, r"algorithm\.lam .* got nan"),
        ({"gdpo_reward_keys": "right"}, "list of different names, got 'right'"),
        ({"gdpo_reward_keys": ["a", "a"]}, r"list of different names, got \['a', 'a'\]"),
        (
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]},
            r"gdpo_reward_weights=\[1\.0\] must have one finite number for each",
        ),
        (
            {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": [float("inf")]},
            r"gdpo_reward_weights=\[inf\] must have one finite number",
        ),
    ],
)
def test_rejects_impossible_settings_of_advantages(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**settings)


def test_rejects_impossible_settings_of_pf_ppo() -> None:
    with pytest.raises(ValueError, match=r"one of pow, max_min, max_random, got 'min'"):
        PFPPOConfig(reweight_method="min")
    with pytest.raises(ValueError, match=r"pf_ppo\.weight_pow .* must be >= 0, got -1"):
        PFPPOConfig(weight_pow=-1.0)


def test_settings_of_advantages_support_verls_access() -> None:
    config = AdvantageConfig(gamma=0.9)
    assert config["gamma"] == config.get("gamma") == config.gamma == 0.9
    assert config.get("num_repeat", 3) == 3
    assert config.pf_ppo.get("reweight_method") == "pow"
