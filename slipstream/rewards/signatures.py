"""How a reward function wants to be called, which its parameters tell.

    VERL  compute_score(data_source, solution_str, ground_truth, extra_info, ...) -> number or dict
          compute_score(data_sources, solution_strs, ground_truths, extra_infos, ...) -> list
    TRL   reward(completions, prompts, completion_ids, <columns>, ...) -> list of numbers

Knows samples, and nothing of what a function computes. Used by `custom` and by the managers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from slipstream.types import Sample

COMPLETIONS = "completions"
"""The parameter that all of TRL's reward functions have."""

SOLUTIONS = "solution_strs"
"""The same of VERL's for batches."""


class Signature(Protocol):
    """One way to call a function about one sample."""

    def arguments(self, sample: Sample, response: str) -> dict[str, Any]:
        """Keywords of the call; `response` is the text of the sample's response."""
        ...

    def result(self, returned: Any) -> Any:
        """What a call returned of the sample: a number, a mapping with `score`, or what is neither.
        Raises ValueError where it is not of the right form."""
        ...


class VerlSignature:
    """VERL's. `extra_info` gains `num_turns`, the number of assistant segments."""

    ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

    def arguments(self, sample: Sample, response: str) -> dict[str, Any]:
        turns = sum(1 for segment in sample.segments if segment.role == "assistant")
        values = (
            sample.data_source,
            response,
            sample.ground_truth,
            {**sample.extra_info, "num_turns": turns},
        )
        return dict(zip(self.ARGUMENTS, values, strict=True))

    def result(self, returned: Any) -> Any:
        return returned


class TRLSignature:
    """TRL's (`GRPOTrainer`): lists of one entry each, of prompts, responses, their ids, and of what
    a row has besides: `ground_truth`, `data_source` and all that its `extra_info` holds.

    After a prompt of messages the response is a list of one message, too. A function without
    `**kwargs` gets what it has parameters for; what is bound to it already stays.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._wanted = None if takes_all else frozenset(parameters)
        self._bound = frozenset(function.keywords if isinstance(function, partial) else ())

    def arguments(self, sample: Sample, response: str) -> dict[str, Any]:
        spoken = isinstance(sample.prompt, list)
        row: dict[str, Any] = {
            **sample.extra_info,
            "ground_truth": sample.ground_truth,
            "data_source": sample.data_source,
            "prompts": sample.prompt,
            COMPLETIONS: [{"role": "assistant", "content": response}] if spoken else response,
            "completion_ids": sample.response_ids,
        }
        return {
            name: [value]
            for name, value in row.items()
            if name not in self._bound and (self._wanted is None or name in self._wanted)
        }

    def result(self, returned: Any) -> Any:
        return only_one(returned)


class VerlBatchSignature:
    """That of VERL's `batch` manager: its arguments as lists, of one entry each."""

    ARGUMENTS = tuple(f"{name}s" for name in VerlSignature.ARGUMENTS)

    def arguments(self, sample: Sample, response: str) -> dict[str, Any]:
        values = VerlSignature().arguments(sample, response).values()
        return {name: [value] for name, value in zip(self.ARGUMENTS, values, strict=True)}

    def result(self, returned: Any) -> Any:
        return only_one(returned)


def only_one(returned: Any) -> Any:
    """The entry of a list of one, an array, or a tensor. Raises ValueError for what is none."""
    listed = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(listed, str | Mapping) or not hasattr(listed, "__len__"):
        raise ValueError(f"returned {type(returned).__name__}, not a list of rewards")
    if len(listed) != 1:
        raise ValueError(f"returned {len(listed)} rewards for 1 response")
    if listed[0] is None:
        raise ValueError("returned None: no reward for this response")
    return listed[0]


def signature_of(function: Callable[..., Any]) -> Signature:
    """By the names of its parameters; VERL's for one sample where nothing tells of another."""
    if takes(function, COMPLETIONS):
        return TRLSignature(function)
    return VerlBatchSignature() if takes(function, SOLUTIONS) else VerlSignature()


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of that name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Built-in functions may have no signature.
        return False
