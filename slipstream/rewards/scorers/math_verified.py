r"""Scores math answers by value with the library math-verify: 0.5 equals $\frac12$ and 2/4.

The library (Kydlíček, Hugging Face 2025) implements its own time limit with signals, which work
only in the main thread. It is disabled; the reward manager's deadline applies instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from slipstream.errors import RewardError
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.rewards.scorers.truth import text_of


@cache
def library() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[..., bool]]:
    """Return functions that parse a ground truth, parse a response, and compare the two.

    Raises RewardError if the library is missing, because no response can fix that.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise RewardError(
            f"comparing math answers by value needs the package math-verify ({error}); run: "
            "pip install 'slipstream-rl[math]'"
        ) from error
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


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1.0 if the answer of the response has the value of the ground truth, else 0.0.

    The answer is the content of the last box, or if there is no box, it is parsed from the whole
    response. Raises ValueError if the ground truth cannot be parsed, and RewardError if the
    library is missing.
    """
    of_truth, of_response, verify = library()
    text = text_of(ground_truth, "math_verify", data_source)
    truth = of_truth(rf"\boxed{{{text}}}")
    if not truth:
        raise ValueError(
            f"math_verify: the ground truth {ground_truth!r} cannot be parsed as an answer "
            f"(data_source {data_source!r})"
        )
    # With several boxes, the library would require all of them to be correct.
    boxed = last_boxed(solution_str)
    response = solution_str if boxed is None else rf"\boxed{{{boxed}}}"
    return float(verify(truth, of_response(response), timeout_seconds=None))
