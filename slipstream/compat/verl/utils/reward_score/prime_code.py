"""verl's package `verl.utils.reward_score.prime_code`: programs that pass tests."""

from __future__ import annotations

from typing import Any

from slipstream.rewards.scorers import code as scorer

__all__ = ["compute_score"]


def compute_score(
    completion: str, test_cases: Any, continuous: bool = False
) -> tuple[bool | float, list[dict[str, Any]]]:
    """Return the result of a program, and a list with the counts of its tests.

    The result is True if the program passes all tests, else False. With `continuous`, the result of
    a program that fails a test is the share of tests that it passes. The first ten tests are run,
    isolated on this machine. A `completion` without a fenced block is the program itself. Raises
    ValueError for tests of another form (`rewards.scorers.code`), and SandboxError if programs
    cannot be run.
    """
    fenced = completion if "```" in completion else f"```python\n{completion}\n```"
    result = scorer.compute_score("", fenced, test_cases)
    passed_all = result["passed"] == result["tests"]
    share = result["score"] if continuous else False
    return True if passed_all else share, [result]
