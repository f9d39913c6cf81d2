"""Settings of rollout correction: parsed thresholds, presets, and rejected settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.algorithms.correction import PRESETS, RolloutCorrectionConfig
from slipstream.algorithms.correction.settings import RS_OPTIONS, Rejection, WeightBounds


def test_defaults_only_report_metrics() -> None:
    config = RolloutCorrectionConfig()
    assert not config.enabled
    assert config.rejections == ()
    assert config == RolloutCorrectionConfig.disabled()


def test_weight_bounds() -> None:
    assert RolloutCorrectionConfig(rollout_is="token").weight_bounds == WeightBounds(None, 2.0)
    as_text = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="3")
    assert as_text.weight_bounds == WeightBounds(None, 3.0)
    icepop = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="0.5_5.0")
    assert icepop.weight_bounds == WeightBounds(0.5, 5.0)


def test_one_threshold_for_all_options_or_one_for_each() -> None:
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1, seq_max_k2,geometric", rollout_rs_threshold="0.5_4, 0.3,2"
    )
    assert config.rejections == (
        Rejection("token_k1", "token", "k1", math.log(0.5), math.log(4)),
        Rejection("seq_max_k2", "seq_max", "k2", -math.inf, 0.3),
        Rejection("geometric", "seq_mean", "ratio", math.log(0.5), math.log(2)),
    )
    shared = RolloutCorrectionConfig(rollout_rs="token_k2,seq_sum_k3", rollout_rs_threshold=0.1)
    assert [rule.high for rule in shared.rejections] == [0.1, 0.1]
    lower = RolloutCorrectionConfig(
        rollout_rs="token", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.25
    )
    assert lower.rejections[0].low == math.log(0.25)


@pytest.mark.parametrize("name", RS_OPTIONS)
def test_every_rejection_option_is_accepted(name: str) -> None:
    config = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=2.0)
    assert config.enabled
    assert [rule.name for rule in config.rejections] == [name]


def test_presets() -> None:
    for name in PRESETS:
        config = RolloutCorrectionConfig.preset(name)
        assert config.bypass_mode == name.startswith("bypass"), name
        assert (config.loss_type == "reinforce") == name.startswith("bypass_pg"), name
        assert ("_rs" in name) == (config.rollout_rs is not None), name
    assert RolloutCorrectionConfig.preset("decoupled_token_is") == RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0
    )
    assert RolloutCorrectionConfig.preset("decoupled_seq_is_rs") == RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    )
    icepop = RolloutCorrectionConfig.decoupled_token_icepop(4.0, 0.25)
    assert icepop.weight_bounds == WeightBounds(0.25, 4.0)
    geo = RolloutCorrectionConfig.bypass_ppo_clip_geo_rs().rejections[0]
    assert (geo.level, geo.statistic) == ("seq_mean", "k1")
    assert (geo.low, geo.high) == (math.log(0.999), math.log(1.001))
    # Every preset except `disabled` has a classmethod, and PRESETS lists all of them.
    methods = {n for n in vars(RolloutCorrectionConfig) if n.startswith(("decoupled", "bypass_p"))}
    assert methods | {"disabled"} == set(PRESETS)


def test_rejects_a_threshold_without_weights() -> None:
    with pytest.raises(ValueError, match=r"rollout_is_threshold=3\.0: needs rollout_is,"):
        RolloutCorrectionConfig(rollout_is_threshold=3.0)
    # VERL's files set the default threshold even with rollout_is=null.
    assert not RolloutCorrectionConfig(rollout_is_threshold=2.0).enabled


def test_unknown_preset_error_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'decoupled_token_is'"):
        RolloutCorrectionConfig.preset("decoupled_tokn_is")
    with pytest.raises(ValueError, match="unknown rollout correction preset 'from_dict'"):
        RolloutCorrectionConfig.preset("from_dict")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "geometric"}, "rollout_is=geometric: needs one of token, sequence, null"),
        ({"rollout_is_threshold": 0}, "rollout_is_threshold=0: needs a positive number"),
        ({"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold=5_0.5: needs a positive"),
        ({"rollout_is_threshold": "much"}, 'rollout_is_threshold=much: needs a number or "low'),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold=nan"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True: needs rollout_is"),
        ({"rollout_rs": "token_k4"}, "needs rollout_rs_threshold"),
        (
            {"rollout_rs": "tokn_k1", "rollout_rs_threshold": 2},
            r"rollout_rs=tokn_k1 \(did you mean 'token_k1'\?\): needs some of",
        ),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs=seq_max_k1"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0: needs rollout_rs"),
        ({"rollout_rs_threshold_lower": 0.5}, "rollout_rs_threshold_lower=0.5: needs rollout_rs"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"},
            "needs one entry, or one for each of 3 different options",
        ),
        ({"rollout_rs": "token,token", "rollout_rs_threshold": 2}, "of 2 different options"),
        ({"rollout_rs": "token", "rollout_rs_threshold": 0.5}, "an upper bound of at least 1"),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": "2_0.5"},
            "needs 0 < low <= high for token",
        ),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0_1"}, "one positive number"),
        (
            {
                "rollout_rs": "token",
                "rollout_rs_threshold": "0.5_2",
                "rollout_rs_threshold_lower": 0.4,
            },
            "rollout_rs_threshold_lower=0.4: needs to be null",
        ),
        ({"rollout_token_veto_threshold": 2.0}, "rollout_token_veto_threshold=2.0: needs a ratio"),
        ({"loss_type": "reinforce"}, "loss_type=reinforce: needs bypass_mode=true"),
        ({"loss_type": "dpo"}, "loss_type=dpo: needs one of ppo_clip, reinforce"),
        (
            {"bypass_mode": True, "rollout_is": "token"},
            "rollout_is=token: needs loss_type=reinforce",
        ),
    ],
)
def test_rejects_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.") as error:
        RolloutCorrectionConfig(**settings)
    error.match(message)
