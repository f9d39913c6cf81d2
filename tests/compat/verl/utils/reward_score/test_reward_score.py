"""verl's reward functions under verl's names, with the values of verl's rules."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from slipstream.compat import verl
from slipstream.compat.verl.utils.reward_score import (
    _default_compute_score,
    default_compute_score,
    geo3k,
    get_default_compute_score,
    gsm8k,
    math_batch,
    math_dapo,
    math_reward,
    math_verify,
    prime_code,
    prime_math,
    sandbox_fusion,
)
from slipstream.compat.verl.utils.reward_score import search_r1_like_qa_em as search
from slipstream.compat.verl.utils.reward_score.prime_math.grader import grade_answer, math_equal
from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.scorers import math_verified
from slipstream.rewards.workers import CALL_TIMEOUT_S, TooMuchWorkError
from tests.rewards.sandbox.helpers import isolated


@pytest.mark.parametrize(
    ("text", "box", "content"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}} .", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a}{b}", r"\boxed{a}", "a"),
        (r"\boxed 42$ is it", r"\boxed 42", "42"),
        (r"\boxed{1}, $\boxed 42$", r"\boxed 42", "42"),
        ("no box", None, None),
        (r"open \boxed{1", None, None),
    ],
)
def test_boxes_of_math(text: str, box: str | None, content: str | None) -> None:
    found = math_reward.last_boxed_only_string(text)
    assert found == box
    if found is not None:
        assert math_reward.remove_boxed(found) == content


def test_other_boxes_of_math() -> None:
    assert math_reward.last_boxed_only_string(r"an \fbox{3}") == r"\fbox{3}"
    for text in (r"\fbox{3}", "3", r"\boxed{3", r"x \boxed 3"):
        with pytest.raises(AssertionError):
            math_reward.remove_boxed(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac1{72}", r"\frac{1}{72}"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"5\text{ cm}", "5"),
        ("x = 7", "7"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"90^\circ", "90"),
        (r"\$ 5", "5"),
        (".5", r"\frac{1}{2}"),
    ],
)
def test_normal_forms_of_math(text: str, form: str) -> None:
    assert math_reward.strip_string(text) == form
    assert math_reward.is_equiv(text, form)


def test_equivalence_and_scores_of_math(capsys: pytest.CaptureFixture[str]) -> None:
    assert math_reward.is_equiv(None, None)
    assert not math_reward.is_equiv(None, "1")
    assert not math_reward.is_equiv("1", "2", verbose=True)
    assert capsys.readouterr().out == "1 2\n"
    assert math_reward.compute_score(r"it is \boxed{0.5}", r"\frac{1}{2}") == 1.0
    assert math_reward.compute_score(r"it is \boxed{0.6}", r"\frac{1}{2}") == 0.0
    assert math_reward.compute_score("it is 0.5", "0.5") == 0.0
    batch = math_batch.compute_score_batched(
        ["x"] * 2, [r"\boxed{1}", r"\boxed{2}"], ["1", "1"], [None] * 2, more=1
    )
    assert batch == [1.0, 0.0]


def test_boxes_of_dapo_have_braces() -> None:
    assert math_dapo.last_boxed_only_string(r"\boxed{1} \boxed{a{b}c}") == r"\boxed{a{b}c}"
    assert math_dapo.last_boxed_only_string(r"\boxed 1 and \fbox{2}") is None
    assert math_dapo.last_boxed_only_string(r"\boxed{1") is None
    assert math_dapo.remove_boxed(r"\boxed{a{b}c}") == "a{b}c"
    for text in ("1", r"\boxed{1", r"\fbox{1}"):
        with pytest.raises(AssertionError):
            math_dapo.remove_boxed(text)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("x = 1,234", "1234"),
        (r"$\frac12$", r"\frac{1}{2}"),
        (r"\text{5}", "5"),
        (r"5 \text{ dollars}", "5"),
        (r"\boxed{7}", "7"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("a square", ""),
        (r"the value $3$ of", "3"),
    ],
)
def test_normal_forms_of_dapo(answer: str, form: str) -> None:
    assert math_dapo.normalize_final_answer(answer) == form


def test_minerva_and_strict_boxes() -> None:
    text = "Answer: 1\nAnswer: $2$"
    assert math_dapo.is_correct_minerva(text, "2") == (True, "2")
    assert math_dapo.is_correct_minerva("none", "2") == (False, "[INVALID]")
    assert math_dapo.is_correct_minerva(text, r"so \boxed{2}", gt_need_extract=True)[0]
    with pytest.raises(AssertionError):
        math_dapo.is_correct_minerva(text, "2", gt_need_extract=True)
    own = math_dapo.is_correct_minerva("<a>5</a>", "5", answer_pattern=r"<a>(.*?)</a>")
    assert own == (True, "5")
    assert math_dapo.is_correct_strict_box(r"so \boxed{2}", "2") == (1, "2")
    assert math_dapo.is_correct_strict_box(r"so \boxed{$2$}", "2") == (-1, "$2$")
    assert math_dapo.is_correct_strict_box("2", "2") == (-1, None)
    assert math_dapo.is_correct_strict_box(r"\boxed{2}" + " " * 100, "2") == (-1, None)
    far = r"\boxed{2}" + " " * 150
    assert math_dapo.is_correct_strict_box(far, "2", [0, 0, 0, 105]) == (-1, None)
    assert math_dapo.is_correct_strict_box(far, "2", [0, 0, 0, 100]) == (1, "2")
    with pytest.raises(ValueError, match="must have 4 positions"):
        math_dapo.is_correct_strict_box(far, "2", [1])


def test_verify_and_scores_of_dapo() -> None:
    assert math_dapo.verify("Answer: 2", "2") == (True, "2")
    assert math_dapo.verify(r"Answer: 3 or \boxed{2}", "2") == (False, "3or2")
    assert math_dapo.verify(r"so \boxed{1,000}", "1000") == (True, "1000")
    assert math_dapo.verify("nothing", "2") == (False, "[INVALID]")
    assert math_dapo.verify(r"Answer: 2 \boxed{3}", "3", strict_box_verify=True) == (True, "3")
    assert math_dapo.compute_score("Answer: 2", "2") == {"score": 1.0, "acc": True, "pred": "2"}
    assert math_dapo.compute_score("Answer: 3", "2") == {"score": -1.0, "acc": False, "pred": "3"}
    strict = math_dapo.compute_score("Answer: 2", "2", strict_box_verify=True)
    assert strict == {"score": -1.0, "acc": False, "pred": None}
    late = "Answer: 2" + " " * 400
    assert math_dapo.compute_score(late, "2")["pred"] == "[INVALID]"
    assert math_dapo.compute_score(r"\boxed{2}", "2", True)["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1,234", "1234", "1,234"),
        ("#### 3\n#### -5.5", "-5.5", "-5.5"),
        ("it is 42", None, "42"),
        ("####42", None, "42"),
        ("so 7 .", None, "7"),
        ("none", None, None),
        ("#### 9" + " " * 300, None, None),
    ],
)
def test_answers_of_gsm8k(text: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract_solution(text) == strict
    assert gsm8k.extract_solution(text, method="flexible") == flexible


def test_scores_of_gsm8k() -> None:
    assert gsm8k.compute_score("#### 42", "42") == 1.0
    assert gsm8k.compute_score("#### 41", "42", format_score=0.1) == 0.1
    assert gsm8k.compute_score("42", "42", format_score=0.1) == 0.0
    assert gsm8k.compute_score("it is 42", "42", "flexible", 0.1, 2.0) == 2.0
    with pytest.raises(ValueError, match="method='other' is unknown; use strict or flexible"):
        gsm8k.extract_solution("#### 1", method="other")  # type: ignore[arg-type]


def test_geometry3k() -> None:
    right = r"<think>a</think> \boxed{5}"
    assert geo3k.format_reward(right) == 1.0
    assert geo3k.format_reward(r"\boxed{5}") == geo3k.format_reward("<think>a</think> 5") == 0.0
    assert (geo3k.acc_reward(right, "5"), geo3k.acc_reward(right, "6")) == (1.0, 0.0)
    assert geo3k.acc_reward("5", "5", use_boxed=False) == 1.0
    assert geo3k.acc_reward("5", "5") == 0.0
    assert geo3k.compute_score(right, "5") == pytest.approx(1.0)
    assert geo3k.compute_score(r"\boxed{5}", "5") == pytest.approx(0.9)
    assert geo3k.compute_score(right, "6", format_score=0.25) == pytest.approx(0.25)


def test_geometry3k_compares_values_as_the_built_in_function_does() -> None:
    text, truth = r"<think>a</think> \boxed{\sqrt{8}}", r"2\sqrt{2}"
    assert geo3k.acc_reward(text, truth) == 1.0
    assert geo3k.compute_score(text, truth) == default_compute_score(
        "hiyouga/geometry3k", text, truth
    )
    with pytest.raises(ValueError, match="ground truth"):
        geo3k.compute_score(text, None)  # type: ignore[arg-type]


def test_search_answers() -> None:
    assert search.normalize_answer("The  Big, Apple!") == "big apple"
    assert search.em_check("the apple", ["Pear", "Apple"]) == 1
    assert search.em_check("apples", "Apple") == 0
    assert (search.subem_check("two apples", "apple"), search.subem_check("a", "apple")) == (1, 0)
    text = "<answer>pear</answer> <answer> The apple </answer>"
    assert search.extract_solution(text) == "The apple"
    assert search.extract_solution("apple") is None
    assert search.count_answer_tags(text) == (2, 2)
    truth = {"target": ["apple"]}
    assert search.compute_score(text, truth) == 1.0
    assert search.compute_score("<answer>fig</answer>", truth, format_score=0.1) == 0.1
    assert search.compute_score("fig", truth, format_score=0.1) == 0.0
    many = "<answer>x</answer>" * 10 + "<answer>red apple</answer>"
    assert search.compute_score(many, {"target": "red apple"}, score=2.0) == 0.5
    assert search.compute_score_subem(many, truth, score=2.0) == 2.0
    assert search.compute_score_subem("<answer>fig</answer>", truth, format_score=0.1) == 0.1
    assert search.compute_score_subem("<answer>in 1990</answer>", {"target": 1990}) == 1.0
    for score in (search.compute_score, search.compute_score_subem):
        with pytest.raises(ValueError, match=r"ground truth must be \{'target'"):
            score(text, {"target": []})


def test_math_verify_compares_values() -> None:
    assert math_verify.compute_score(r"so \boxed{\frac{2}{4}}", "0.5") == 1.0
    assert math_verify.compute_score(r"so \boxed{3}", "0.5") == 0.0


def test_math_verify_passes_its_time_limit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []

    class Slow:
        def call(self, *_: Any) -> Any:
            seen.append(CALL_TIMEOUT_S.get())
            raise TooMuchWorkError("slow")

    monkeypatch.setattr(math_verified, "POOL", Slow())
    assert math_verify.compute_score(r"\boxed{x}", "y", timeout_score=-0.5, timeout=3.0) == -0.5
    assert math_verify.compute_score(r"\boxed{x}", "y") == 0.0
    token = CALL_TIMEOUT_S.set(1.0)
    try:
        math_verify.compute_score(r"\boxed{x}", "y")
    finally:
        CALL_TIMEOUT_S.reset(token)
    assert seen == [3.0, 30.0, 1.0]
    assert CALL_TIMEOUT_S.get() is None


def test_prime_math() -> None:
    assert prime_math.compute_score(r"so \boxed{\frac{2}{4}}", "0.5") == (
        True,
        True,
        r"\frac{2}{4}",
    )
    wrong = prime_math.compute_score("Step 2: \\boxed{3}", "0.5")
    assert wrong == (False, True, "3")
    assert prime_math.compute_score(r"\boxed{3}", 5) == (False, False, "3")
    assert prime_math.match_answer("The answer is 12.") == (True, "12")
    assert prime_math.match_answer(r"\boxed{x}") == (False, "x")
    assert prime_math.match_answer("twelve 12") == (False, "twelve 12")
    assert prime_math.remove_boxed(r"\boxed{3}") == "3"
    assert prime_math.remove_boxed("3") is None
    assert prime_math._last_boxed_only_string(r"\boxed{ 3 }") == "3"


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("1/3", r"\frac{1}{3}", True),
        ("x+1", "1+x", True),
        ("2", "3", False),
        (None, "3", False),
    ],
)
def test_answers_are_graded_by_form_or_value(given: str | None, truth: str, equal: bool) -> None:
    assert grade_answer(given, truth) is equal


def test_numbers_are_equal_up_to_percent_and_tolerance() -> None:
    assert math_equal("50%", "0.5")
    assert math_equal("0.5", "50")
    assert not math_equal("50", "0.5", include_percentage=False)
    assert math_equal("1,000.01", 1000)
    assert not math_equal("1001", "1000")
    assert math_equal("1001", "1000", tolerance=1e-2)
    assert math_equal(r"2\pi", "6.28", pi=3.14)
    assert not math_equal(r"2\pi", "6.28", tolerance=1e-6)
    assert math_equal("x + 1", "1 + x", timeout=True)


TESTS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2", "4", "6"]}
RIGHT = "print(2 * int(input()))"
PARTLY = "n = int(input())\nprint(2 * n if n < 3 else 0)"


class FakeScores:
    """Stands for the scorer of programs: passes tests whose program has the text of `passed`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, source: str, text: str, tests: Any, **more: Any) -> dict[str, Any]:
        self.calls.append((text, more.get("sandbox")))
        count = len((json.loads(tests) if isinstance(tests, str) else tests)["inputs"])
        passed = count if RIGHT in text else count - 1
        return {"score": passed / count, "passed": passed, "tests": count}


def test_prime_code(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = FakeScores()
    monkeypatch.setattr("slipstream.rewards.scorers.code.compute_score", scores)
    right, details = prime_code.compute_score(RIGHT, TESTS)
    assert (right, details[0]["passed"]) == (True, 3)
    assert scores.calls[0][0] == f"```python\n{RIGHT}\n```"
    fenced = f"So:\n```python\n{PARTLY}\n```"
    assert prime_code.compute_score(fenced, json.dumps(TESTS))[0] is False
    assert scores.calls[1][0] == fenced
    assert prime_code.compute_score(fenced, TESTS, continuous=True)[0] == pytest.approx(2 / 3)
    assert prime_code.compute_score(RIGHT, TESTS, continuous=True)[0] is True


@isolated
def test_prime_code_runs_programs() -> None:
    assert prime_code.compute_score(PARTLY, TESTS, continuous=True)[0] == pytest.approx(2 / 3)


def test_sandbox_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = FakeScores()
    monkeypatch.setattr("slipstream.rewards.scorers.code.compute_score", scores)
    held = threading.Semaphore(1)
    url = "http://localhost:1/run_code"
    result = sandbox_fusion.compute_score(url, held, 512, f"```\n{PARTLY}\n```", TESTS, True, 3)
    assert result[0] == pytest.approx(2 / 3)
    assert result[1][0]["tests"] == 3
    assert held.acquire(blocking=False)
    limits = scores.calls[0][1]._limits
    assert (limits.memory_mb, limits.run_timeout_s) == (512, 3)
    with pytest.raises(ConfigError, match="nowhere"):
        sandbox_fusion.compute_score("nowhere", None, None, RIGHT, TESTS)


def test_default_scores_by_data_source() -> None:
    assert default_compute_score is _default_compute_score is verl.default_compute_score
    assert get_default_compute_score("naive") is default_compute_score
    assert default_compute_score("openai/gsm8k", "it is 42", "42") == 0.0
    assert default_compute_score("openai/gsm8k", "it is 42", "42", method="flexible") == 1.0
    with_url = default_compute_score(
        "openai/gsm8k", "it is 42", "42", {}, "http://localhost:1/run_code", method="flexible"
    )
    assert with_url == 1.0
    assert default_compute_score("aime2024", "Answer: 2", "2", more="unused")["score"] == 1.0
    for kind in (NotImplementedError, RewardError):
        with pytest.raises(kind, match="no built-in reward function for data_source 'mystery'"):
            default_compute_score("mystery", "", "")
