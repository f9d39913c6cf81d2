"""verl's package `verl.utils.reward_score.sandbox_fusion`: programs that a server runs."""

from __future__ import annotations

import contextlib
from typing import Any

from slipstream.compat.rewards import fusion_sandbox
from slipstream.rewards.scorers import code as scorer

__all__ = ["compute_score"]


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """Return the share of tests that a program passes, and a list with the counts of its tests.

    The program is in a fenced block of `completion`; without one the share is 0.0. The first ten
    tests are run, with `continuous` or without. `timeout` is in seconds per test,
    `memory_limit_mb` in MB. `concurrent_semaphore`, if given, is held during the call. Raises
    ValueError for tests of another form (`rewards.scorers.code`), and SandboxError if programs
    cannot be run.
    """
    sandbox = fusion_sandbox(sandbox_fusion_url, memory_limit_mb, timeout)
    with concurrent_semaphore or contextlib.nullcontext():
        result = scorer.compute_score("", completion, test_cases, sandbox=sandbox)
    return float(result["score"]), [result]
