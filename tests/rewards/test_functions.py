from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards import functions
from slipstream.rewards.functions import (
    data_sources,
    default_compute_score,
    exact_match,
    gsm8k,
    gsm8k_answer,
    register_reward,
)


def test_exact_match() -> None:
    assert exact_match("x", " yes\n", "yes") == 1.0
    assert exact_match("x", "Yes", "yes") == 0.0
    assert exact_match("x", "b", ["a", "b"]) == 1.0
    assert exact_match("x", "7", 7) == 1.0
    with pytest.raises(ValueError, match="no ground truth"):
        exact_match("x", "", None)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1 then #### 1,234", "1234", "1234"),
        ("#### -5.", "-5", "-5"),
        ("#### $12.50", "12.50", "12.50"),
        ("the answer is 42.", None, "42"),
        ("####7", None, "7"),
        ("no number, really ...", None, None),
        ("#### 7" + " " * 300, None, None),
    ],
)
def test_gsm8k_answer(text: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k_answer(text, "strict") == strict
    assert gsm8k_answer(text, "flexible") == flexible


def test_gsm8k_scores() -> None:
    assert gsm8k("gsm8k", "#### 1,000", "1000") == 1.0
    assert gsm8k("gsm8k", "#### 1000", "1,000") == 1.0
    assert gsm8k("gsm8k", "#### 999", "1000", format_score=0.1) == 0.1
    assert gsm8k("gsm8k", "999", "1000", format_score=0.1) == 0.0
    assert gsm8k("gsm8k", "1000", 1000, method="flexible", score=2.0) == 2.0
    with pytest.raises(ConfigError, match="unknown method 'loose'"):
        gsm8k_answer("1", "loose")  # type: ignore[arg-type]


def test_dispatch_by_data_source() -> None:
    truth: dict[str, Any] = {"numbers": [1, 2, 4], "target": 6}
    assert default_compute_score("countdown", "answer 2 + 4", truth, {}) == 1.0
    assert default_compute_score("exact_match", "a", "a") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 3", "3") == 1.0
    with pytest.raises(
        RewardError,
        match=r"data_source 'mystery' \(known: countdown, exact_match, gsm8k, openai/gsm8k\): set "
        r"custom_reward_function\.path",
    ):
        default_compute_score("mystery", "", "")


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_BY_SOURCE", dict(functions._BY_SOURCE))

    def length(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        return float(len(solution_str))

    register_reward("length", length)
    assert "length" in data_sources()
    assert default_compute_score("length", "abc", None) == 3.0
    with pytest.raises(ConfigError, match="has a reward function already"):
        register_reward("length", length)
