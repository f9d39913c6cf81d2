r"""Mathematics compared by value, by the library math-verify (Kydlíček, Hugging Face 2025): 0.5 is
$\frac12$ is 2/4.

The library's own time limit works by signals, in a process's main thread alone. It is left out: the
reward manager's deadline holds for this scorer as for any other.
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
    """What reads a ground truth, what reads a response, what compares. Raises RewardError where
    the library is missing: no response can repair that."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise RewardError(
            f"mathematics compared by value needs the package math-verify ({error}); run: "
            "pip install 'slipstream-rl[math]'"
        ) from error
    # It warns of the limit that is left out.
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
    """1.0 where the answer of a response, what is in its last box if there is one, has the value of
    the ground truth, else 0.0.

    Raises ValueError where the ground truth cannot be read, RewardError where the library is
    missing.
    """
    of_truth, of_response, verify = library()
    text = text_of(ground_truth, "math_verify", data_source)
    truth = of_truth(rf"\boxed{{{text}}}")
    if not truth:
        raise ValueError(
            f"math_verify: the ground truth {ground_truth!r} cannot be read as an answer "
            f"(data_source {data_source!r})"
        )
    # The library would ask of several boxes that all be right.
    boxed = last_boxed(solution_str)
    response = solution_str if boxed is None else rf"\boxed{{{boxed}}}"
    return float(verify(truth, of_response(response), timeout_seconds=None))
