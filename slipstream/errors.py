"""The exceptions of Slipstream, helpers for checks, and texts of foreign errors.

Every message says what is wrong and what to do about it.

    SlipstreamError
    ├── ConfigError (ValueError)         a setting is unknown, of the wrong type, or impossible
    ├── DataError (ValueError)           a dataset, prompt or tokenizer cannot be used
    ├── CheckpointError (RuntimeError)   a checkpoint or run folder is unusable
    ├── EngineError (RuntimeError)       an inference engine refused or failed a request
    │   └── RequestError (ValueError)    the request itself is invalid
    ├── RewardError (RuntimeError)       a reward function failed or ran past its deadline
    ├── TrainingError (RuntimeError)     training cannot continue (repeated non-finite losses, ...)
    └── StageTimeoutError (TimeoutError)      a stage ran past its deadline

A failed rollout or reward is data (`Status.FAILED` with its reason), not an exception. These
exceptions end a run or a call. All of them can be pickled, so that they cross process boundaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

MAX_REASON = 2_000
"""Maximum number of characters of a reason that is stored, logged or printed."""


class SlipstreamError(Exception):
    """Base class of all errors that Slipstream raises on purpose.

    `exit_code` is the exit status of the command line after this error.
    """

    exit_code = 1


class ConfigError(SlipstreamError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another setting."""

    exit_code = 2


class DataError(SlipstreamError, ValueError):
    """A data set, a prompt or a tokenizer cannot be used."""

    exit_code = 3


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint or run folder is missing, corrupt, from a newer version or from another run."""

    exit_code = 4


class EngineError(SlipstreamError, RuntimeError):
    """An inference engine failed."""

    exit_code = 5


class RequestError(EngineError, ValueError):
    """A generation request is invalid. The message names the field and the limit."""


class RewardError(SlipstreamError, RuntimeError):
    """A reward function failed, and the settings say that a failure ends the run."""

    exit_code = 6


class TrainingError(SlipstreamError, RuntimeError):
    """Training cannot continue."""

    exit_code = 7


class StageTimeoutError(SlipstreamError, TimeoutError):
    """A stage exceeded its deadline. The message names the stage and what it waited for."""

    exit_code = 8


def check_at_least_one(settings: object, *names: str, where: str = "") -> None:
    """Raise ConfigError if a named attribute is below 1 or NaN. None is allowed.

    `where` is a prefix of the message.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"{where}{name}={value} must be at least 1")


def name_of(name: str | Enum, kind: str) -> str:
    """Return the text under which a registry stores `name`: a text, or an `Enum` member's value.

    `kind` says what is registered, for the message. Raises ConfigError for other types.
    """
    value = name.value if isinstance(name, Enum) else name
    if not isinstance(value, str):
        raise ConfigError(
            f"the name of a {kind} must be text, or an Enum member whose value is text, got "
            f"{shortened(repr(name), 200)}"
        )
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?` with the names most similar to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def shortened(text: str, limit: int = MAX_REASON) -> str:
    """Return `text` as a plain string that any file can store: at most `limit` characters.

    A longer text ends with its original length. Lone surrogates are written as escapes.
    """
    if type(text) is str and len(text) <= limit and text.isascii():
        return text
    # The methods of `str` itself, because a subclass may override them.
    length = str.__len__(text)
    start = str.__getitem__(text, slice(0, limit))
    clean = start.encode("utf-8", "backslashreplace").decode()
    if length <= limit and len(clean) <= limit:
        return clean
    note = f"... ({length:,} characters)"
    return clean[: max(0, limit - len(note))] + note


def reason_of(error: BaseException) -> str:
    """Return type and message of an error, at most `MAX_REASON` characters.

    Never raises: a user's exception class may have a broken `__str__` or `__name__`.
    """
    try:
        name = shortened(type(error).__name__)
    except BaseException:
        name = "an error without a name"
    try:
        text = shortened(str(error))
    except BaseException:
        text = ""
    return shortened(f"{name}: {text}") if text else name
