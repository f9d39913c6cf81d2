"""Decides from a reward function's parameter names how to call it.

    verl  compute_score(data_source, solution_str, ground_truth, extra_info, ...) -> number or dict
          compute_score(data_sources, solution_strs, ground_truths, extra_infos, ...) -> list
          compute_reward(data, ...) -> tensor (B,) or (B, T), of a `DataProto`
    TRL   reward(completions, prompts, completion_ids, <columns>, trainer_state, log_extra,
                 log_metric) -> list of numbers and None

Knows samples, but not what a function computes. Used by `custom` and by the managers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from slipstream.rewards.protocol import Score
from slipstream.rewards.results import NOT_APPLICABLE, InvalidResultError, key_names
from slipstream.rewards.trl import (
    ENVIRONMENTS,
    LOG_EXTRA,
    LOG_METRIC,
    STATE,
    TRAINER_ARGUMENTS,
    Logs,
    TrainerState,
)
from slipstream.types import Sample

COMPLETIONS, COMPLETION_IDS, PROMPTS = "completions", "completion_ids", "prompts"

TRL_ARGUMENTS = (COMPLETIONS, COMPLETION_IDS, PROMPTS, *TRAINER_ARGUMENTS)
"""The parameters that identify TRL's reward functions. A function needs only one of them."""

SOLUTIONS = "solution_strs"
"""The parameter that identifies verl's batch functions."""

DATA = "data"
"""The parameter that identifies functions of a `DataProto`; their other parameters are options."""

RETURN_DICT = "return_dict"
"""The argument that makes verl's managers return a mapping instead of a tensor."""

REWARD_TENSOR = "reward_tensor"
"""The key of the rewards in the mapping that verl's managers return."""


class Signature(Protocol):
    """One way to call a reward function on finished samples."""

    many: bool
    """Whether one call can score several samples."""

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        """Return the keyword arguments of a call; `responses` are the decoded responses."""
        ...

    def results(self, returned: Any, count: int) -> list[Any]:
        """Return one entry per sample from the return value of a call.

        An entry is a number or a mapping with `score`; its type is checked later. Raises
        InvalidResultError if the return value has the wrong form.
        """
        ...


class VerlSignature:
    """verl's signature for one sample. Adds `num_turns` (assistant segments) to `extra_info`."""

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
    """The signature of verl's `batch` manager: the arguments of `VerlSignature` as lists."""

    ARGUMENTS = tuple(f"{name}s" for name in VerlSignature.ARGUMENTS)
    many = True

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        one = VerlSignature()
        rows = [one.arguments([s], [r]) for s, r in zip(samples, responses, strict=True)]
        return {f"{name}s": [row[name] for row in rows] for name in VerlSignature.ARGUMENTS}

    def results(self, returned: Any, count: int) -> list[Any]:
        return listed(returned, count)


class TRLSignature:
    """TRL's signature (`GRPOTrainer`): lists of prompts, responses, response ids, and columns.

    The columns are `ground_truth`, `data_source`, and all entries of `extra_info`. If the prompt is
    a list of messages, the response is a list with one message. The function also gets the state of
    the trainer and functions that log (see `trl`). A function without `**kwargs` gets only the
    arguments it has parameters for. Keywords that are already bound are not overridden. A result
    None means that the function does not apply to that response.
    """

    many = True

    def __init__(self, function: Callable[..., Any], max_steps: int | None = None) -> None:
        self.max_steps = max_steps
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._parameters = None if takes_all else frozenset(parameters)
        self._bound = frozenset(function.keywords if isinstance(function, partial) else ())

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        rows = [self._row(s, r) for s, r in zip(samples, responses, strict=True)]
        names = dict.fromkeys(name for row in rows for name in row)
        logs = Logs(len(rows))
        given = {
            **{name: [row.get(name) for row in rows] for name in names},
            STATE: self._state(samples),
            LOG_EXTRA: logs.log_extra,
            LOG_METRIC: logs.log_metric,
        }
        return {
            name: value
            for name, value in given.items()
            if name not in self._bound and (self._parameters is None or name in self._parameters)
        }

    def _state(self, samples: Sequence[Sample]) -> TrainerState:
        versions = [max(sample.versions, default=0) for sample in samples]
        epochs = [sample.epoch for sample in samples]
        return TrainerState(
            max(0, *versions), float(max(epochs, default=0)), max_steps=self.max_steps
        )

    def results(self, returned: Any, count: int) -> list[Any]:
        return listed(returned, count)

    @staticmethod
    def _row(sample: Sample, response: str) -> dict[str, Any]:
        is_chat = isinstance(sample.prompt, list)
        return {
            **sample.extra_info,
            "ground_truth": sample.ground_truth,
            "data_source": sample.data_source,
            PROMPTS: sample.prompt,
            COMPLETIONS: [{"role": "assistant", "content": response}] if is_chat else response,
            COMPLETION_IDS: list(sample.response_ids),
        }


class DataProtoSignature:
    """The signature of functions and managers that take a whole `DataProto`.

    If there is a parameter `return_dict`, as in verl's managers, it is set to True. The function
    returns a tensor (B,), or (B, T) with token rewards, which are summed. Like verl's managers it
    may also return a mapping with `reward_tensor` and `reward_extra_info`, or a tuple of the two.
    """

    ARGUMENTS = (DATA,)
    many = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._more = {RETURN_DICT: True} if takes(function, RETURN_DICT) else {}

    def arguments(self, samples: Sequence[Sample], responses: Sequence[str]) -> dict[str, Any]:
        # Imported late, because the other signatures do not need torch.
        from slipstream.rewards.data_proto import proto_of

        return {DATA: proto_of(samples, responses), **self._more}

    def results(self, returned: Any, count: int) -> list[Any]:
        rewards: Any = returned
        more: Mapping[str, Any] = {}
        if isinstance(returned, Mapping):
            if REWARD_TENSOR not in returned:
                raise InvalidResultError(
                    f"returned a mapping without {REWARD_TENSOR!r} (keys: {key_names(returned)})"
                )
            rewards, more = returned[REWARD_TENSOR], returned.get("reward_extra_info") or {}
        elif isinstance(returned, tuple):
            if len(returned) != 2 or not isinstance(returned[1], Mapping):
                raise InvalidResultError(
                    "returned a tuple that is not of rewards and what goes with them"
                )
            rewards, more = returned
        values = [_summed(v) if isinstance(v, list) else v for v in listed(rewards, count)]
        parts = {key: _entries(part, count) for key, part in more.items()}
        # verl's managers also report `score`, the value before penalties. The tensor is the reward.
        return [
            value
            if isinstance(value, Score)
            else {**{key: part[i] for key, part in parts.items()}, "score": value}
            for i, value in enumerate(values)
        ]


def _summed(rewards: list[Any]) -> float:
    try:
        return float(sum(rewards))
    except (TypeError, OverflowError) as error:
        raise InvalidResultError(
            f"returned rewards of tokens that are no numbers: {error}"
        ) from error


def listed(returned: Any, count: int) -> list[Any]:
    """Return the `count` entries of a list, array or tensor. None becomes a failure of its own.

    Raises InvalidResultError for another type or length.
    """
    failed = Score(0.0, ok=False, failure=NOT_APPLICABLE)
    return [failed if value is None else value for value in _entries(returned, count)]


def _entries(returned: Any, count: int) -> list[Any]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
        raise InvalidResultError(f"returned {type(returned).__name__}, not a list of rewards")
    if len(values) != count:
        responses = "1 response" if count == 1 else f"{count} responses"
        raise InvalidResultError(f"returned {len(values)} rewards for {responses}")
    # The object may contain more than its length says.
    entries = list(islice(values, count + 1))
    if len(entries) != count:
        raise InvalidResultError(f"returned {type(returned).__name__} whose length is wrong")
    return entries


def signature_of(function: Callable[..., Any], max_steps: int | None = None) -> Signature:
    """Return the signature that the parameter names indicate; by default verl's for one sample.

    `max_steps` is the number of steps of the run, for functions with TRL's `trainer_state`.
    """
    if is_trl(function):
        return TRLSignature(function, max_steps)
    if wants_data(function):
        return DataProtoSignature(function)
    return VerlBatchSignature() if takes(function, SOLUTIONS) else VerlSignature()


def is_trl(function: Callable[..., Any]) -> bool:
    """Return whether a function has TRL's signature: one of its parameters, and not verl's texts.

    `data` may be a column if the function takes responses or their ids.
    """
    if takes(function, COMPLETIONS):
        return True
    if takes(function, SOLUTIONS) or takes(function, VerlSignature.ARGUMENTS[1]):
        return False
    if takes(function, DATA) and not takes(function, COMPLETION_IDS):
        return False
    return any(takes(function, name) for name in (*TRL_ARGUMENTS, ENVIRONMENTS))


def wants_data(function: Callable[..., Any]) -> bool:
    """Return whether a function takes a `DataProto`: it has `data` and not `solution_str`."""
    solution = takes(function, VerlSignature.ARGUMENTS[1])
    return takes(function, DATA) and not solution and not is_trl(function)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether a function has a parameter of that name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return False
