"""Reads what a user's reward function returned or raised.

This is the only module that touches such an object. Whatever touching it raises is a failure with a
reason. Called where the function runs: in its thread, its event loop or its process. So an object
that hangs, for example in `__float__`, exceeds the deadline of the call.
"""

from __future__ import annotations

import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from slipstream.errors import RewardError, reason_of, shortened
from slipstream.rewards.protocol import SCORE_PART, Score

MAX_PARTS = 1_000
"""Maximum number of entries in a mapping that a function returns."""

MAX_SCORE = 1e15
"""Largest absolute value of a score. The square of a larger one could overflow in float32."""

NOT_APPLICABLE = "returned None: no reward for this response"
"""The reason if a function of lists has None for a response, as TRL's functions may."""

_MAX_KEY = 200
"""Maximum number of characters in the name of a reward part."""


class ReadsResults(Protocol):
    """A signature, as far as return values are concerned (see `signatures.Signature`)."""

    def results(self, returned: Any, count: int) -> list[Any]: ...


class ReadsLogs(Protocol):
    """What a function logged during its call (see `trl.Logs`)."""

    def metrics(self) -> dict[str, float]: ...

    def extras(self, place: int) -> dict[str, str]: ...


class _OneResult:
    """The signature of a function that returns one result."""

    def results(self, returned: Any, count: int) -> list[Any]:
        return [returned]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call: one result per response, or the reason of its failure.

    A result is a score, or the reason why there is none. `fatal` says that the reason must end the
    run, because the function raised RewardError.
    """

    results: Sequence[Score | str] = ()
    failure: str | None = None
    fatal: bool = False

    def each(self, count: int) -> list[Score | str]:
        """Return one result for each of `count` responses.

        Raises RewardError if the function did, or if it returned another number of results.
        """
        if self.fatal:
            raise RewardError(self.failure)
        if self.failure is not None:
            return [self.failure] * count
        if len(self.results) != count:
            raise RewardError(f"{len(self.results)} results for {count} responses")
        return list(self.results)


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns the return value of a call for `count` responses into its outcome.

    `logs` are what the function logged. They are added to the scores.
    """

    signature: ReadsResults = field(default_factory=_OneResult)
    count: int = 1
    logs: ReadsLogs | None = None

    def outcome(self, call: Callable[[], Any]) -> CallOutcome:
        """Call a function and return its outcome. Only a real Ctrl-C is raised."""
        try:
            return CallOutcome(self._read(call()))
        except BaseException as error:
            return outcome_of(error)

    async def awaited(self, call: Callable[[], Awaitable[Any]]) -> CallOutcome:
        """Await a function and return its outcome. Raises what the function raises.

        The caller turns that into an outcome: Python ends a coroutine that awaits another one with
        GeneratorExit before that one can answer.
        """
        return CallOutcome(self._read(await call()))

    def _read(self, returned: Any) -> list[Score | str]:
        read = [_read_one(value) for value in self.signature.results(returned, self.count)]
        return [self._logged(result, place) for place, result in enumerate(read)]

    def _logged(self, result: Score | str, place: int) -> Score | str:
        """Add the logs to a score. A part that the function returned takes precedence."""
        if self.logs is None or isinstance(result, str):
            return result
        logged = _parts(list(self.logs.metrics().items()))
        extras = {**self.logs.extras(place), **result.extras}
        return replace(result, parts={**logged, **result.parts}, extras=extras)


def outcome_of(error: BaseException) -> CallOutcome:
    """Return the outcome of a call that raised `error`.

    Raises KeyboardInterrupt in the main thread, where it is the user's Ctrl-C.
    """
    # `isinstance` also asks the property `__class__`, which may raise.
    kind = type(error)
    if issubclass(kind, KeyboardInterrupt) and _in_main_thread():
        raise error
    if issubclass(kind, RewardError):
        return CallOutcome(failure=reason_of(error).removeprefix("RewardError: "), fatal=True)
    if issubclass(kind, InvalidResultError):
        return CallOutcome(failure=shortened(str(error)))
    return CallOutcome(failure=reason_of(error))


class InvalidResultError(ValueError):
    """A return value has the wrong form. The message says how, as `returned ...`."""


def read_result(result: Any) -> Score | str:
    """Return a function's return value as a score, or a text that says why it is invalid.

    Valid values are a number, or a mapping with the key `score`. Other numbers of the mapping
    become `parts`; `pred` is the parsed answer; other values are ignored. Zero-dimensional arrays
    and tensors count as numbers. Only a real Ctrl-C is raised.
    """
    try:
        return _read_one(result)
    except BaseException as error:
        return outcome_of(error).failure or "returned an unusable value"


def _read_one(result: Any) -> Score | str:
    if isinstance(result, Score):
        return _checked(result)
    parts: dict[str, float] = {}
    answer: str | None = None
    value = result
    if type(result) is not float and isinstance(result, Mapping):
        entries = list(islice(result.items(), MAX_PARTS + 1))
        if len(entries) > MAX_PARTS:
            return f"returned a mapping with more than {MAX_PARTS:,} entries"
        if SCORE_PART not in result:
            return f"returned a mapping without 'score' (keys: {key_names(result)})"
        value = result[SCORE_PART]
        parts = _parts(entries)
        pred = result.get("pred")
        answer = None if pred is None else limited_text(pred)
    number = number_of(value)
    if number is None:
        if inspect.iscoroutine(value):
            value.close()
            return "returned a coroutine: define the function with async def, so that it is awaited"
        return shortened(f"returned {type(value).__name__}, not a number")
    return fault_of(number) or Score(number, parts, answer=answer)


def fault_of(number: float) -> str | None:
    """Return why a number cannot be a score; None if it can."""
    if not math.isfinite(number):
        return f"returned {number}, not a finite number"
    if abs(number) > MAX_SCORE:
        return f"returned {number:g}, but a score is a number from {-MAX_SCORE:g} to {MAX_SCORE:g}"
    return None


def _checked(score: Score) -> Score | str:
    """Return a function's own `Score` with plain values of the right types."""
    if not score.ok:
        return limited_text(score.failure or "the reward gave no usable score and no reason")
    number = number_of(score.value)
    if number is None or not math.isfinite(number):
        shown = type(score.value).__name__ if number is None else number
        return shortened(f"returned a score of {shown}, not a finite number")
    return fault_of(number) or Score(
        number,
        _parts(list(islice(score.parts.items(), MAX_PARTS)), keep_score=True),
        failure=None if score.failure is None else limited_text(score.failure),
        answer=None if score.answer is None else limited_text(score.answer),
        extras={
            limited_text(key, _MAX_KEY): limited_text(value) for key, value in score.extras.items()
        },
    )


def _parts(entries: Sequence[tuple[Any, Any]], *, keep_score: bool = False) -> dict[str, float]:
    parts: dict[str, float] = {}
    for key, entry in entries:
        part = number_of(entry)
        name = limited_text(key, _MAX_KEY)
        if part is not None and abs(part) <= MAX_SCORE and (keep_score or name != SCORE_PART):
            parts[name] = part
    return parts


def limited_text(value: Any, limit: int | None = None) -> str:
    """Return a value as text of at most `limit` characters, by default those of a message."""
    if type(value) is int and value.bit_length() > 4_000:
        # `str` refuses integers of more than 4,300 digits.
        value = f"0x{value >> max(0, value.bit_length() - 4_000):x}..."
    text = value if isinstance(value, str) else str(value)
    return shortened(text) if limit is None else shortened(text, limit)


def key_names(mapping: Mapping[Any, Any]) -> str:
    """Return the keys of a mapping for a message."""
    return shortened(", ".join(limited_text(key, _MAX_KEY) for key in islice(mapping, MAX_PARTS)))


def number_of(value: Any) -> float | None:
    """Return a number, or a zero-dimensional array or tensor, as a float; None for other values."""
    if type(value) is float:
        return value  # most values are, and this is faster
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
