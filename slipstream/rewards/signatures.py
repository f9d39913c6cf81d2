"""How a reward function wants to be called, which its parameters tell.

    VERL  compute_score(data_source, solution_str, ground_truth, extra_info, ...) -> number or dict
          compute_score(data_sources, solution_strs, ground_truths, extra_infos, ...) -> list
          compute_reward(data, ...) -> tensor (B,) or (B, T), of a `DataProto`
    TRL   reward(completions, prompts, completion_ids, <columns>, ...) -> list of numbers

Knows samples, and nothing of what a function computes. Used by `custom` and by the managers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from slipstream.rewards.protocol import Score
from slipstream.types import Sample

COMPLETIONS = "completions"
"""The parameter that all of TRL's reward functions have."""

SOLUTIONS = "solution_strs"
"""The same of VERL's for batches."""

DATA = "data"
"""The same of those for VERL's `DataProto`; they have no other that is filled from the data."""

RETURN_DICT = "return_dict"
"""What VERL's managers are asked with for a mapping instead of a tensor."""

REWARD_TENSOR = "reward_tensor"
"""Where VERL's managers have the rewards in a mapping."""


class Signature(Protocol):
    """One way to call a function about finished samples."""

    many: bool
    """Whether one call may be of several samples."""

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        """Keywords of the call; `responses` are the texts of the samples' responses."""
        ...

    def results(self, returned: Any, count: int) -> list[Any]:
        """What a call returned of each of `count` samples: a number, a mapping with `score`, or
        what is neither. Raises ValueError where it is not of the right form."""
        ...


class VerlSignature:
    """VERL's, of one sample. `extra_info` gains `num_turns`, the number of assistant segments."""

    ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
    many = False

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        (sample,), (response,) = samples, responses
        turns = sum(1 for segment in sample.segments if segment.role == "assistant")
        values = (
            sample.data_source,
            response,
            sample.ground_truth,
            {**sample.extra_info, "num_turns": turns},
        )
        return dict(zip(self.ARGUMENTS, values, strict=True))

    def results(self, returned: Any, count: int) -> list[Any]:
        return [returned]


class VerlBatchSignature:
    """That of VERL's `batch` manager: its arguments as lists."""

    ARGUMENTS = tuple(f"{name}s" for name in VerlSignature.ARGUMENTS)
    many = True

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        one = VerlSignature()
        rows = [one.arguments([s], [r]) for s, r in zip(samples, responses, strict=True)]
        return {f"{name}s": [row[name] for row in rows] for name in VerlSignature.ARGUMENTS}

    def results(self, returned: Any, count: int) -> list[Any]:
        return listed(returned, count)


class TRLSignature:
    """TRL's (`GRPOTrainer`): lists of prompts, responses, their ids, and of what rows have besides:
    `ground_truth`, `data_source` and all that their `extra_info` holds.

    After a prompt of messages a response is a list of one message, too. A function without
    `**kwargs` gets what it has parameters for; what is bound to it already stays.
    """

    many = True

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._wanted = None if takes_all else frozenset(parameters)
        self._bound = frozenset(function.keywords if isinstance(function, partial) else ())

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        rows = [self._row(s, r) for s, r in zip(samples, responses, strict=True)]
        names = dict.fromkeys(name for row in rows for name in row)
        return {
            name: [row.get(name) for row in rows]
            for name in names
            if name not in self._bound and (self._wanted is None or name in self._wanted)
        }

    def results(self, returned: Any, count: int) -> list[Any]:
        return listed(returned, count)

    @staticmethod
    def _row(sample: Sample, response: str) -> dict[str, Any]:
        spoken = isinstance(sample.prompt, list)
        return {
            **sample.extra_info,
            "ground_truth": sample.ground_truth,
            "data_source": sample.data_source,
            "prompts": sample.prompt,
            COMPLETIONS: [{"role": "assistant", "content": response}] if spoken else response,
            "completion_ids": list(sample.response_ids),
        }


class DataProtoSignature:
    """A function, or a manager, of a whole `DataProto`; one with a parameter `return_dict`, as
    VERL's managers have it, is asked for a mapping.

    It returns a tensor (B,), or (B, T) whose rewards of tokens are added up; or, as VERL's managers
    do, a mapping with `reward_tensor` and `reward_extra_info`, or the two as a tuple.
    """

    ARGUMENTS = (DATA,)
    many = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._more = {RETURN_DICT: True} if takes(function, RETURN_DICT) else {}

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        # Torch is not needed for the other signatures.
        from slipstream.rewards.data_proto import proto_of

        return {DATA: proto_of(samples, responses), **self._more}

    def results(self, returned: Any, count: int) -> list[Any]:
        rewards: Any = returned
        more: Mapping[str, Any] = {}
        if isinstance(returned, Mapping):
            if REWARD_TENSOR not in returned:
                raise ValueError(
                    f"returned a mapping without {REWARD_TENSOR!r} (keys: "
                    f"{', '.join(map(str, returned))})"
                )
            rewards, more = returned[REWARD_TENSOR], returned.get("reward_extra_info") or {}
        elif isinstance(returned, tuple):
            if len(returned) != 2 or not isinstance(returned[1], Mapping):
                raise ValueError("returned a tuple that is not of rewards and what goes with them")
            rewards, more = returned
        values = [_added(v) if isinstance(v, list) else v for v in listed(rewards, count)]
        parts = {key: _entries(part, count) for key, part in more.items()}
        # VERL's managers tell a `score` of their own, before penalties: the tensor is the reward.
        return [
            value
            if isinstance(value, Score)
            else {**{key: part[i] for key, part in parts.items()}, "score": value}
            for i, value in enumerate(values)
        ]


def _added(rewards: list[Any]) -> float:
    try:
        return float(sum(rewards))
    except TypeError as error:
        raise ValueError(f"returned rewards of tokens that are no numbers: {error}") from error


def listed(returned: Any, count: int) -> list[Any]:
    """The entries of a list, an array, or a tensor of so many. Raises ValueError for what is none,
    and where one is None."""
    values = _entries(returned, count)
    if any(value is None for value in values):
        raise ValueError("returned None: no reward for this response")
    return values


def _entries(returned: Any, count: int) -> list[Any]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
        raise ValueError(f"returned {type(returned).__name__}, not a list of rewards")
    if len(values) != count:
        responses = "1 response" if count == 1 else f"{count} responses"
        raise ValueError(f"returned {len(values)} rewards for {responses}")
    return list(values)


def signature_of(function: Callable[..., Any]) -> Signature:
    """By the names of its parameters; VERL's for one sample where nothing tells of another."""
    if takes(function, COMPLETIONS):
        return TRLSignature(function)
    if wants_data(function):
        return DataProtoSignature(function)
    return VerlBatchSignature() if takes(function, SOLUTIONS) else VerlSignature()


def wants_data(function: Callable[..., Any]) -> bool:
    """Whether a function is of VERL's `DataProto`: one that has `solution_str`, too, is not."""
    return takes(function, DATA) and not takes(function, VerlSignature.ARGUMENTS[1])


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of that name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Built-in functions may have no signature.
        return False
