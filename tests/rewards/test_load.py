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


@pytest.mark.parametrize("name", ["naive", "dapo", "prime"])
def test_options_of_the_built_in_functions_reach_them(name: str) -> None:
    found = []
    for options in ({}, {"method": "flexible"}):
        manager = load_reward_manager(name, decode=decode, compute_score_kwargs=options)
        found.append(anyio.run(manager.score_sample, sample(7, source="gsm8k", truth="7")).value)
    assert found == [0.0, 1.0]


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
        (
            "naive",
            {"compute_score_kwargs": {"methd": "strict"}},
            r"reward_model\.compute_score_kwargs\.methd is unknown; did you mean method",
        ),
        (
            "naive",
            {"compute_score_kwargs": {"method": "strict"}, "function": len},
            r"reward_model\.compute_score_kwargs .*set custom_reward_function\.reward_kwargs",
        ),
        (
            "remote",
            {
                "compute_score_kwargs": {"method": "strict"},
                "reward_kwargs": {"url": "http://localhost:1"},
            },
            r"reward_model\.compute_score_kwargs .*another function scores; remove them",
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


SIGNALS = """
import signal

def ten(solution_str, **_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 10.0

def each(solution_strs, **_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [10.0 for _ in solution_strs]
"""


@pytest.mark.parametrize(("name", "function"), [("naive", "ten"), ("batch", "each")])
def test_functions_that_use_signals_fail_in_threads_and_the_remedy_works(
    tmp_path: Path, name: str, function: str
) -> None:
    file = tmp_path / "signals.py"
    file.write_text(SIGNALS)

    def score(manager: str) -> Score:
        made = load_reward_manager(
            manager, decode=decode, custom_path=file, custom_name=function, timeout_s=20.0
        )
        found: Score = anyio.run(made.score_sample, sample(1))
        return found

    failure = score(name).failure
    assert failure is not None
    assert "reward_model.reward_manager=prime" in failure
    assert "signal only works in main thread" in failure
    assert score("prime") == Score(10.0)


def test_functions_of_terms_run_in_processes_with_the_manager_prime(tmp_path: Path) -> None:
    file = tmp_path / "signals.py"
    file.write_text(SIGNALS)
    made = load_reward_manager(
        "prime",
        decode=decode,
        terms={"mine": {"weight": 2, "path": str(file), "name": "ten"}},
        timeout_s=20.0,
    )
    found = anyio.run(made.score_sample, sample(1))
    assert (found.failure, found.parts["mine"]) == (None, 10.0)


@pytest.mark.parametrize(
    ("code", "manager", "warns"),
    [
        ("from math_verify import parse", "naive", True),
        ("import math_verify", "batch", True),
        ("import signal\nsignal.alarm", "dapo", True),
        ("from math_verify import parse", "prime", False),
        ("from math_verify import parse\nx = dict(parsing_timeout=None)", "naive", False),
        ("# from math_verify import parse", "naive", False),
        ("from slipstream.rewards import functions as math_verify", "naive", False),
    ],
)
def test_files_that_use_signals_are_named_before_a_call_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, manager: str, warns: bool
) -> None:
    file = tmp_path / "mine.py"
    arguments = "data_sources, solution_strs, ground_truths, extra_infos"
    if manager != "batch":
        arguments = "data_source, solution_str, ground_truth, extra_info"
    file.write_text(f"def compute_score({arguments}):\n    return 1\n\ndef unused():\n")
    with file.open("a") as opened:
        opened.writelines(f"    {line}\n" for line in [*code.splitlines(), "pass"])
    load_reward_manager(manager, decode=decode, custom_path=file)
    assert ("reward_model.reward_manager=prime" in caplog.text) == warns
