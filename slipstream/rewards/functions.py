"""Built-in reward functions with verl's signature, selected by a row's `data_source`.

They are pure functions of text and know nothing of samples, tokens or tokenizers. Called by the
reward managers, and by users as building blocks of their own reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Literal, Protocol

from slipstream.errors import ConfigError, RewardError, did_you_mean, name_of
from slipstream.rewards import countdown, lookup
from slipstream.rewards.sandbox.local import BubblewrapSandbox
from slipstream.rewards.sandbox.protocol import Sandbox
from slipstream.rewards.scorers import (
    code,
    geometry3k,
    gsm8k,
    math_boxed,
    math_dapo,
    math_verified,
    prime_math,
    reasoning_gym,
    search_qa,
)
from slipstream.rewards.scorers.outputs import is_tolerance
from slipstream.rewards.scorers.truth import accepted, text_of
from slipstream.rewards.workers import WorkerPool

_SEARCHED = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""Data sets of Search-R1."""

_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
"""Data sets of NuminaMath."""


class UnknownSourceError(RewardError, NotImplementedError):
    """A data source has no built-in reward function.

    It ends the run under any `on_failure` policy, because no response can fix it.
    """


class SyncComputeScore(Protocol):
    """verl's reward function: returns a number, or a mapping with key `score`."""

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
    """Return 1.0 if the response equals the ground truth, or one entry of a list, else 0.0.

    Leading and trailing white space is ignored. The ground truth 5.0, a number, is both `5` and
    `5.0`. Raises ValueError if there is no ground truth.
    """
    answers = accepted(ground_truth) or [ground_truth]
    texts = {text_of(one, "exact_match", data_source, empty=True) for one in answers}
    texts |= {str(one) for one in answers if isinstance(one, float)}
    return 1.0 if solution_str.strip() in texts else 0.0


_BY_SOURCE: dict[str, SyncComputeScore] = {
    "countdown": countdown.compute_score,
    "exact_match": exact_match,
    "lookup": lookup.compute_score,
    **dict.fromkeys(("gsm8k", "openai/gsm8k"), gsm8k.compute_score),
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        math_boxed.compute_score,
    ),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), math_dapo.compute_score),
    "math_verify": math_verified.compute_score,
    **dict.fromkeys((f"numina_{name}" for name in _NUMINA), prime_math.compute_score),
    "hiyouga/geometry3k": geometry3k.compute_score,
    **dict.fromkeys((f"searchR1_{name}" for name in _SEARCHED), search_qa.compute_score),
}

_BY_PREFIX: dict[str, SyncComputeScore] = {
    "aime": math_dapo.compute_score,
    reasoning_gym.PREFIX: reasoning_gym.compute_score,
}
"""Reward functions by prefix of the data source."""


_CODE = ("codecontests", "apps", "codeforces", "taco")
"""Data sources whose responses are programs."""


def data_sources() -> list[str]:
    """Return the `data_source` values with a built-in function, sorted. `*` matches any suffix."""
    return sorted([*_BY_SOURCE, *_CODE, *(f"{begin}*" for begin in _BY_PREFIX)])


def register_reward(data_source: str | Enum, function: SyncComputeScore) -> None:
    """Register the reward function of a `data_source`. Raises ConfigError if it has one already."""
    source = name_of(data_source, "data source")
    if source in _BY_SOURCE or source in _CODE:
        raise ConfigError(f"data_source {source!r} already has a reward function")
    _BY_SOURCE[source] = function


def sandbox_of(compute_score: Callable[..., Any]) -> Sandbox | None:
    """Return the sandbox in which the built-in functions run programs; None for other functions."""
    bound = compute_score.keywords if isinstance(compute_score, partial) else {}
    inner = compute_score.func if isinstance(compute_score, partial) else compute_score
    if inner is not default_compute_score:
        return None
    sandbox: Sandbox = bound.get("sandbox") or BubblewrapSandbox()
    return sandbox


def is_program(data_source: str) -> bool:
    """Return whether the responses of a data source are programs to run."""
    return data_source in _CODE


def worker_pool_of(data_source: str) -> WorkerPool | None:
    """Return the worker processes that score a data source; None if it is scored without any."""
    by_value = ("math_verify", "hiyouga/geometry3k", *(f"numina_{name}" for name in _NUMINA))
    if data_source in by_value:
        return math_verified.POOL
    return reasoning_gym.POOL if data_source.startswith(reasoning_gym.PREFIX) else None


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
    method: Literal["strict", "flexible"] = "strict",
    float_tolerance: float | None = None,
) -> float | Mapping[str, Any]:
    """Return the score from the built-in function of `data_source`.

    `sandbox` runs programs; None runs them on this machine, isolated. `method` is an option of
    `gsm8k`, `float_tolerance` of programs; other functions have no options. Raises
    UnknownSourceError if the data source has no function. That ends the run under any `on_failure`
    policy, because no response can fix it.
    """
    if data_source in _CODE:
        return code.compute_score(
            data_source,
            solution_str,
            ground_truth,
            extra_info,
            sandbox=sandbox,
            float_tolerance=float_tolerance,
        )
    function = _BY_SOURCE.get(data_source)
    if function is None:
        prefixes = (f for begin, f in _BY_PREFIX.items() if data_source.startswith(begin))
        function = next(prefixes, None)
    if function is None:
        raise UnknownSourceError(
            f"no built-in reward function for data_source {data_source!r} (known: "
            f"{', '.join(data_sources())}): set custom_reward_function.path to a Python file with "
            "your own compute_score, or data.reward_fn_key to the column that names the source"
        )
    if function is gsm8k.compute_score:
        return gsm8k.compute_score(
            data_source, solution_str, ground_truth, extra_info, method=method
        )
    return function(data_source, solution_str, ground_truth, extra_info)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown or invalid options of the built-in functions."""
    known = ("method", "float_tolerance")
    for name, value in options.items():
        key = f"reward_model.compute_score_kwargs.{name}"
        if name not in known:
            raise ConfigError(
                f"{key} is unknown{did_you_mean(name, known) or '.'} The options of the built-in "
                f"reward functions are {', '.join(known)}"
            )
        if name == "method" and value not in ("strict", "flexible"):
            raise ConfigError(f"{key}={value!r} is unknown; set strict or flexible")
        if name == "float_tolerance" and value is not None and not is_tolerance(value):
            raise ConfigError(f"{key}={value!r} must be a number of 0 or more, or null")
