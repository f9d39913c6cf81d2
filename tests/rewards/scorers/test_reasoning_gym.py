"""Answers to reasoning-gym problems are extracted and graded by the library's rule."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers import reasoning_gym
from slipstream.rewards.scorers.reasoning_gym import compute_score, is_arithmetic

pytest.importorskip("reasoning_gym")

MEGABYTE = "x" * 1_000_000

# The sum is 1000. The library ignores signs, leading zeros, trailing decimals and commas. An answer
# with the correct number among other text scores the number's share of the characters.
ANSWERS = [
    ("<answer>1000</answer>", 1.0),
    ("<answer> 1000\n</answer>", 1.0),
    ("<answer>+1000</answer>", 1.0),
    ("<answer>1,000</answer>", 1.0),
    ("<answer>01000</answer>", 1.0),
    ("<answer>1000.00</answer>", 1.0),
    ("<answer>+01,000.0</answer>", 1.0),
    ("<answer>-1000</answer>", 4 / 5),
    ("<answer>1001</answer>", 0.0),
    ("<answer>1000.5</answer>", 4 / 6),
    ("<answer>10 00</answer>", 0.0),
    ("<answer></answer>", 0.0),
    ("<answer>  </answer>", 0.0),
    ("1000", 0.0),
    ("", 0.0),
    ("<answer>1000", 0.0),
    ("<Answer>1000</Answer>", 0.0),
    ("<answer>7</answer> no: <answer>1000</answer>", 1.0),
    ("<answer>1000</answer> no: <answer>7</answer>", 0.0),
    ("<answer>one thousand</answer>", 0.0),
    ("<answer>\\boxed{1000}</answer>", 4 / 12),
    ("<answer>\u0661\u0660\u0660\u0660</answer>", 1.0),  # Arabic digits are digits
    (MEGABYTE + "<answer>1000</answer>", 1.0),
    (MEGABYTE, 0.0),
    ("<answer>" + MEGABYTE + "</answer>", 0.0),
]


@pytest.mark.parametrize(("response", "expected"), ANSWERS)
def test_answers_are_graded(response: str, expected: float) -> None:
    entry = {"question": "600 + 400", "answer": "1000", "metadata": {}}
    scored = compute_score("reasoning_gym/chain_sum", response, "1000", {"reasoning_gym": entry})
    assert scored["score"] == pytest.approx(expected)
    assert scored["acc"] == float(expected == 1.0)


HACKS = {
    "string_insertion": ["list(entry['answer'])", "oracle_answer", "[*oracle_answer]"],
    "spiral_matrix": ["oracle_answer.split()", "entry['answer'].split()"],
    "binary_matrix": ["oracle_answer", "[r.split() for r in entry['answer'].split('\\n')]"],
    "n_queens": ["entry['metadata']['valid_answers'][0]", "valid_solutions"],
    "polynomial_multiplication": [
        "__import__('sys')._getframe(3).f_locals['entry']['answer']",
        "().__class__",
        "exec('import os')",
        "getattr(x, 'y')",
    ],
    "puzzle24": ["__import__('os').getpid()", "open('/etc/passwd')", "9**9**9**9"],
    "countdown": ["exit()", "eval('24')", "9**99999999"],
}


@pytest.mark.parametrize(("name", "hack"), [(n, hack) for n in HACKS for hack in HACKS[n]])
def test_answers_are_never_evaluated_as_code(
    name: str, hack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import reasoning_gym as library

    monkeypatch.setattr(reasoning_gym.POOL, "_cpu_limit_s", 0.5)
    entry = library.create_dataset(name, size=1, seed=1)[0]
    extra = {"reasoning_gym": entry}

    def score(answer: str) -> float:
        scored = compute_score(f"reasoning_gym/{name}", f"<answer>{answer}</answer>", "", extra)
        return float(scored["score"])

    assert score(hack) <= score("wrong")
    if entry["answer"] is not None:
        assert score(entry["answer"]) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3*x**2 - 2*x + 1", True),
        ("x**2/2 + C", True),
        ("exp(x)*sin(2*x) + log(x)", True),
        ("(1 + 2.5e-3)*4", True),
        ("x.y", False),
        ("__import__", False),
        ("eval(1)", False),
        ("lambda", False),
        ("'x'", False),
        ("[1]", False),
        ("sympify(1)", False),
        ("x if y", False),
    ],
)
def test_only_arithmetic_is_parsed(text: str, expected: bool) -> None:
    assert is_arithmetic(text) == expected
