"""Math answers are compared by value."""

from __future__ import annotations

import builtins
import threading
from typing import Any

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.scorers import math_verified
from slipstream.rewards.scorers.math_verified import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("", "5", 0.0),
        ("no idea", "5", 0.0),
        ("5", "5", 1.0),
        ("so x = 5", "5", 1.0),
        ("The answer is 5.", 5, 1.0),
        ("1000 dollars", "1000", 1.0),
        (r"\boxed{5.0}", "5", 1.0),
        (r"\boxed{-5}", "5", 0.0),
        (r"\boxed{+5}", "5", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{\$5}", "5", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{1/2}", r"\frac12", 1.0),
        (r"\boxed{.5}", r"\frac12", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt2", 1.0),
        (r"\boxed{2^3}", "8", 1.0),
        (r"\boxed{\frac{\pi}{2}}", r"\pi/2", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{(2,1)}", "(1, 2)", 0.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{(0,1]}", "[0,1)", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{5} no, \boxed{4}", "5", 0.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\boxed{50}", "50%", 1.0),
        (r"\boxed{50\%}", r"\frac{1}{2}", 1.0),
        (r"\boxed{5\%}", r"50\%", 0.0),
        (r"\boxed{1}", "1 000", 0.0),
        (r"\boxed{1\,000\pi}", r"1000\pi", 1.0),
        (r"\boxed{\pi}", r"1\,000\pi", 0.0),
        (r"\boxed{10^{-3}}", "1e-3", 1.0),
        (r"\boxed{0.01}", "1e-3", 0.0),
        (r"\boxed{10^{-60}}", "1e-60", 1.0),
        ("\\boxed{\u22125}", "-5", 1.0),
        ("\\boxed{\u22125}", "5", 0.0),
        (r"\boxed{5~\text{cm}}", "5", 1.0),
        (r"\boxed{$\frac{1}{2}$}", r"\(0.5\)", 1.0),
        # Very small numbers are compared relative to their size.
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2006!}", 1.0),
        (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", 1.0),
        (r"\boxed{10^{-20}}", "0", 0.0),
        (r"\boxed{\frac{1}{10^{10}}x}", r"\frac{1}{10^{11}}x", 0.0),
        (r"\boxed{\{\frac{1}{2^{98}}\}}", r"\{\frac{1}{2^{99}}\}", 0.0),
        (r"\boxed{(0,\frac{1}{2^{98}})}", r"(0,\frac{1}{2^{99}})", 0.0),
        (
            r"\boxed{\begin{pmatrix}\frac{1}{2^{98}}\\0\end{pmatrix}}",
            r"\begin{pmatrix}\frac{1}{2^{99}}\\0\end{pmatrix}",
            0.0,
        ),
        (r"\boxed{(\sqrt2+\sqrt3)^2-2\sqrt6}", "5", 1.0),
        (r"\boxed{(\sqrt2+\sqrt3)^2-2\sqrt6-5}", "0", 1.0),
        (r"\boxed{0.333333\text{ cm}}", r"\frac13", 1.0),
        (r"\boxed{10^{20}+1}", r"10^{20}", 0.0),
        ("x" * 1_000_000 + r"\boxed{5}", "5", 1.0),
    ],
)
def test_scores(response: str, truth: object, score: float) -> None:
    assert compute_score("math_verify", response, truth) == score


def test_scoring_works_outside_of_the_main_thread() -> None:
    found: list[float] = []
    other = threading.Thread(target=lambda: found.append(compute_score("m", "1/2", "0.5")))
    other.start()
    other.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "no ground truth"),
        ("", "the ground truth is empty"),
        ("$$", "cannot be parsed as an answer"),
    ],
)
def test_invalid_ground_truths_raise(truth: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_score("math_verify", "5", truth)


def test_a_missing_library_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "math_verify":
            raise ImportError("none")
        return found(name, *rest, **more)

    math_verified.library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RewardError, match=r"pip install 'slipstream-rl\[math\]'"):
        math_verified.library()


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verified.library.cache_clear()
    monkeypatch.delattr("math_verify.grader.sympy_numeric_eq")
    with pytest.raises(RewardError, match="run: pip install math-verify==0"):
        math_verified.library()


@pytest.mark.parametrize(
    "answer",
    [
        "9^{99999999}",
        "9^{9^{9^9}}",
        "10000000!",
        r"\binom{100000000}{50000000}",
        "(" * 10_000 + "1" + ")" * 10_000,
        "{" * 10_000 + "1" + "}" * 10_000,
        r"\frac{" * 3_000 + "1" + "}{2}" * 3_000,
        r"\sum_{i=1}^{10^{12}} i^{-1}",
        r"\prod_{i=1}^{100000000} i",
        r"\sqrt[99999]{2^{9999999}}",
        "9" * 6_000,
        "\ud800",
        "\x00",
    ],
)
def test_answers_that_cannot_be_computed_are_wrong(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_verified.POOL, "_cpu_limit_s", 0.3)
    assert compute_score("math_verify", rf"\boxed{{{answer}}}", "5") == 0.0
    assert compute_score("math_verify", r"\boxed{\sqrt{25}}", "5") == 1.0
