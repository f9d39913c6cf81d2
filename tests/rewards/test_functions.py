"""Built-in reward functions are selected by data source."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards import functions
from slipstream.rewards.functions import (
    data_sources,
    default_compute_score,
    exact_match,
    register_reward,
)


def test_exact_match_compares_stripped_text() -> None:
    assert exact_match("x", " yes\n", "yes") == 1.0
    assert exact_match("x", "Yes", "yes") == 0.0
    assert exact_match("x", "b", ["a", "b"]) == 1.0
    assert exact_match("x", "7", 7) == 1.0
    with pytest.raises(ValueError, match="no ground truth"):
        exact_match("x", "", None)


TRUTH = {"numbers": [1, 2, 4], "target": 6}


@pytest.mark.parametrize(
    ("data_source", "response", "truth", "score"),
    [
        ("countdown", "answer 2 + 4", TRUTH, 1.0),
        ("exact_match", "a", "a", 1.0),
        ("gsm8k", "#### 3", "3", 1.0),
        ("openai/gsm8k", "#### 3", "3", 1.0),
        ("lighteval/MATH", r"\boxed{3}", "3", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{3}", "3", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{3}", "3", 1.0),
        ("math", "Answer: 3", "3", {"score": 1.0, "acc": True, "pred": "3"}),
        ("math_dapo", "Answer: 3", "3", {"score": 1.0, "acc": True, "pred": "3"}),
        ("math_dapo_reasoning", "Answer: 3", "3", {"score": 1.0, "acc": True, "pred": "3"}),
        ("aime2024", "Answer: 3", "3", {"score": 1.0, "acc": True, "pred": "3"}),
        ("math_verify", r"\boxed{6/2}", "3", 1.0),
        ("hiyouga/geometry3k", r"<think></think>\boxed{3}", "3", 1.0),
        ("searchR1_nq", "<answer>3</answer>", {"target": "3"}, 1.0),
        ("searchR1_bamboogle", "<answer>3</answer>", {"target": "3"}, 1.0),
    ],
)
def test_each_data_source_selects_its_function(
    data_source: str, response: str, truth: Any, score: Any
) -> None:
    assert default_compute_score(data_source, response, truth, {}) == score


def test_a_data_source_without_a_function_is_refused() -> None:
    with pytest.raises(
        RewardError,
        match=r"data_source 'mystery' \(known: .*aime\*, apps, .*\): set "
        r"custom_reward_function\.path",
    ):
        default_compute_score("mystery", "", "")


def test_register_reward_adds_a_data_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_BY_SOURCE", dict(functions._BY_SOURCE))

    def length(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        return float(len(solution_str))

    register_reward("length", length)
    assert "length" in data_sources()
    assert default_compute_score("length", "abc", None) == 3.0
    with pytest.raises(ConfigError, match="already has a reward function"):
        register_reward("length", length)
