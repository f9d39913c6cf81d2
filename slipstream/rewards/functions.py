"""Built-in reward functions in VERL's signature, chosen by a row's `data_source`.

Pure functions of text; they know nothing of samples, tokens or tokenizers. Called by the reward
managers, and by users as building blocks of their own reward functions.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import Any, Literal, Protocol

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards import countdown


class ComputeScore(Protocol):
    """VERL's reward function: a number, or a mapping with the key `score`; may be async."""

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


class SyncComputeScore(Protocol):
    """A `ComputeScore` that answers at once."""

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float | Mapping[str, Any]: ...


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """1.0 if the response equals the ground truth (or one of a list) up to outer white space.

    Raises `ValueError` where there is no ground truth.
    """
    if ground_truth is None:
        raise ValueError(f"exact_match: no ground truth (data_source {data_source!r})")
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return 1.0 if solution_str.strip() in {str(a).strip() for a in accepted} else 0.0


# GSM8K (Cobbe et al. 2021) writes the final answer after "####". The two ways to read it, and
# reading the end of the response only, follow VERL's scorer.
_GSM8K_TAIL = 300
_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,$]+)")
_GSM8K_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def gsm8k_answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final number in the last 300 characters of a response, without commas and `$`, or None.

    `strict` takes the last number after `#### `; `flexible` the last thing that looks like one.
    """
    tail = solution_str[-_GSM8K_TAIL:]
    if method == "strict":
        found = _GSM8K_STRICT.findall(tail)
        return _plain_number(found[-1]) if found else None
    if method != "flexible":
        raise ConfigError(f"gsm8k: unknown method {method!r}; use strict or flexible")
    found = [text for text in _GSM8K_FLEXIBLE.findall(tail) if any(c.isdigit() for c in text)]
    return _plain_number(found[-1]) if found else None


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").rstrip(".")


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right final answer, `format_score` for a wrong one, 0.0 for none.

    Answers are compared as text after removing commas and `$`.
    """
    if ground_truth is None:
        raise ValueError(f"gsm8k: no ground truth (data_source {data_source!r})")
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _plain_number(str(ground_truth).strip()) else format_score


_BY_SOURCE: dict[str, SyncComputeScore] = {
    "countdown": countdown.compute_score,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
}


def data_sources() -> list[str]:
    """The `data_source` values with a built-in reward function, sorted."""
    return sorted(_BY_SOURCE)


def register_reward(data_source: str, function: SyncComputeScore) -> None:
    """Give a `data_source` its reward function. Raises `ConfigError` if it has one."""
    if data_source in _BY_SOURCE:
        raise ConfigError(f"data_source {data_source!r} has a reward function already")
    _BY_SOURCE[data_source] = function


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float | Mapping[str, Any]:
    """Score with the function that belongs to `data_source`.

    Raises `RewardError` for a source without one: that no response can repair, so it ends the run
    whatever the policy for failures.
    """
    function = _BY_SOURCE.get(data_source)
    if function is None:
        raise RewardError(
            f"no built-in reward function for data_source {data_source!r} (known: "
            f"{', '.join(data_sources())}): set custom_reward_function.path to a Python file with "
            "your own compute_score, or data.reward_fn_key to the column that names the source"
        )
    return function(data_source, solution_str, ground_truth, extra_info)
