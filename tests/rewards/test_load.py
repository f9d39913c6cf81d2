"""Reward managers are created by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError
from slipstream.rewards import load as load_module
from slipstream.rewards.load import load_reward_manager, register_reward_manager
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Score
from tests.rewards.helpers import decode, sample


def test_load_reward_manager_creates_the_configured_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, k=1):\n return k"
    )
    custom = load_reward_manager(decode=decode, custom_path=file, custom_kwargs={"k": 7})
    assert anyio.run(custom.score_sample, sample(1)) == Score(7.0)
    default = load_reward_manager(decode=decode)
    assert anyio.run(default.score_sample, sample(1, 2)) == Score(1.0)
    options = {"max_resp_len": 2, "overlong_buffer_cfg": {"enable": True, "len": 1}}
    dapo = load_reward_manager("dapo", decode=decode, reward_kwargs=options)
    assert anyio.run(dapo.score_sample, sample(1, 2)) == Score(0.0, {"acc": 1.0})
    monkeypatch.setattr(load_module, "_MANAGERS", dict(load_module._MANAGERS))
    register_reward_manager("mine", NaiveRewardManager)
    assert isinstance(load_reward_manager("mine", decode=decode), NaiveRewardManager)
    with pytest.raises(ConfigError, match="'mine' already exists"):
        register_reward_manager("mine", NaiveRewardManager)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "nave",
            {},
            r"reward_model\.reward_manager 'nave' is unknown.*naive.*; use batch, dapo, gdpo, ",
        ),
        ("naive", {"on_failure": "skip"}, "'skip' is unknown; use zero, drop, stop"),
        ("naive", {"timeout_s": 0}, r"reward_model\.timeout_s 0 must be"),
        ("naive", {"num_workers": 0}, r"reward_model\.num_workers 0 must be"),
        ("naive", {"reward_kwargs": {"x": 1}}, r"reward_kwargs \['x'\] do not fit.*'naive'"),
        ("naive", {"reward_kwargs": {"timeout_s": 1}}, "must not contain timeout_s"),
        ("naive", {"custom_kwargs": {"k": 1}}, r"custom_reward_function\.path is not"),
        (
            "limited",
            {"reward_kwargs": {"max_rpm": 0}},
            r"reward_kwargs\.max_rpm=0 .*above 0",
        ),
        (
            "limited",
            {"reward_kwargs": {"estimated_tokens_per_request": 0}},
            r"estimated_tokens_per_request=0: .* set it above 0",
        ),
        (
            "remote",
            {"reward_kwargs": {"url": "http://x", "max_rmp": 5}},
            r"reward_kwargs \['max_rmp', 'url'\] do not fit.*max_rmp",
        ),
        (
            "limited",
            {"num_workers": 4, "reward_kwargs": {"max_concurrent": 5}},
            r"max_concurrent=5 .* there are 4; set reward_model\.num_workers=5",
        ),
        (
            "limited",
            {"reward_kwargs": {"max_concurrent": 500}},
            r"max_concurrent=500 .* there are 256; set reward_model\.num_workers=500",
        ),
        ("prime", {"num_workers": 0}, r"reward_model\.num_workers 0 must be"),
        (
            "dapo",
            {"reward_kwargs": {"overlong_buffer_cfg": {"size": 1}}},
            r"unknown size \(known: enable, len, penalty_factor, log\)",
        ),
        (
            "dapo",
            {"reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 5}}},
            r"overlong_buffer_cfg\.len 5 must be between 1 and max_resp_len \(None\)",
        ),
    ],
)
def test_invalid_settings_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_manager(name, decode=decode, **options)
