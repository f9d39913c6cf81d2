r"""Scores math answers by value with the library math-verify: 0.5 equals $\frac12$ and 2/4.

The library (Kydlíček, Hugging Face 2025) computes with the answer, which can take forever:
`9^{99999999}`. So it runs in worker processes, which end at a limit of CPU time (`workers`). The
library's own time limit uses signals, which cannot interrupt a long operation; it is disabled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from slipstream.errors import RewardError
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of
from slipstream.rewards.workers import TooMuchWorkError, WorkerPool


@cache
def check_installed() -> None:
    """Raise RewardError if the library is missing. Does not import it."""
    if find_spec("math_verify") is None:
        raise _missing("there is no module math_verify")


@cache
def library() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[..., bool]]:
    """Return functions that parse a ground truth, parse a response, and compare the two.

    Raises RewardError if the library is missing, because no response can fix that.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise _missing(str(error)) from error
    # The library warns about the disabled time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()

    def of_truth(text: str) -> list[Any]:
        found: list[Any] = parse(text, extraction_config=[latex], parsing_timeout=None)
        return found

    def of_response(text: str) -> list[Any]:
        found: list[Any] = parse(text, extraction_config=[plain, latex], parsing_timeout=None)
        return found

    return of_truth, of_response, verify


def _missing(reason: str) -> RewardError:
    return RewardError(
        f"comparing math answers by value needs the package math-verify ({reason}); run: "
        "pip install 'slipstream-rl[math]'"
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    timeout_score: float = 0.0,
) -> float:
    """Return 1.0 if the answer of the response has the value of the ground truth, else 0.0.

    The answer is the content of the last box, or if there is no box, it is parsed from the whole
    response. An answer that takes too much time or memory gets `timeout_score`. Raises ValueError
    if the ground truth cannot be parsed, and RewardError if the library is missing.
    """
    text = text_of(ground_truth, "math_verify", data_source)
    # With several boxes, the library would require all of them to be correct.
    boxed = last_boxed(solution_str)
    response = solution_str if boxed is None else rf"\boxed{{{boxed}}}"
    try:
        same = POOL.call(response, text)
    except TooMuchWorkError:
        return timeout_score
    if same is None:
        raise ValueError(
            f"math_verify: the ground truth {ground_truth!r} cannot be parsed as an answer "
            f"(data_source {data_source!r})"
        )
    return float(same)


def same_value(begin: Callable[[], None], response: str, truth: str) -> bool | None:
    """Return whether an answer has the value of the ground truth; None if the truth has no value.

    Called in a worker process, where the library is loaded once.
    """
    of_truth, of_response, verify = library()
    parsed = of_truth(rf"\boxed{{{truth}}}")
    if not parsed:
        return None
    begin()
    return bool(verify(parsed, of_response(response), timeout_seconds=None))


POOL = WorkerPool(f"{__name__}:same_value", prepare=f"{__name__}:library")
"""Workers that compare math answers."""
