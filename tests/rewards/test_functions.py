"""Built-in reward functions are selected by data source."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards import functions
from slipstream.rewards.functions import (
    check_options,
    data_sources,
    default_compute_score,
    exact_match,
    register_reward,
)
from slipstream.rewards.sandbox.local import UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import ProgramLimits


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


def test_options_reach_their_functions() -> None:
    assert default_compute_score("gsm8k", "so it is 3", "3") == 0.0
    assert default_compute_score("gsm8k", "so it is 3", "3", method="flexible") == 1.0
    assert default_compute_score("exact_match", "3", "3", method="flexible") == 1.0
    truth = {"inputs": [""], "outputs": ["0.333"]}
    sandbox = UnisolatedSandbox(ProgramLimits())
    scored = default_compute_score(
        *("apps", "```python\nprint(1 / 3)\n```", truth), sandbox=sandbox, float_tolerance=0.01
    )
    assert isinstance(scored, dict)
    assert scored["score"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "strict"}, r"compute_score_kwargs\.methods is unknown; did you mean method"),
        ({"method": "loose"}, r"method='loose' is unknown; set strict or flexible"),
        ({"float_tolerance": -1}, r"float_tolerance=-1 must be a number of 0 or more, or null"),
        ({"float_tolerance": "1e-6"}, r"float_tolerance='1e-6' must be"),
        ({"float_tolerance": True}, r"float_tolerance=True must be"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(options)
    check_options({"method": "flexible", "float_tolerance": 1e-6})
    check_options({"float_tolerance": None})


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
