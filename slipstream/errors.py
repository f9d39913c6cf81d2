"""The exception tree, and wording that checks share.

Every error names the boundary that was crossed and the remedy.

    SlipstreamError
    ├── ConfigError (ValueError)         a setting is unknown, of the wrong type, or impossible
    ├── DataError (ValueError)           a dataset, prompt or tokenizer cannot be used
    ├── CheckpointError (RuntimeError)   a checkpoint or run folder is missing, corrupt or foreign
    ├── EngineError (RuntimeError)       an inference engine refused or failed a request
    │   └── RequestError (ValueError)    the request itself is invalid
    ├── RewardError (RuntimeError)       a reward function failed or ran past its deadline
    ├── TrainingError (RuntimeError)     the update cannot go on (repeated non-finite losses, ...)
    └── StageTimeoutError (TimeoutError)      a stage ran past its deadline

A failed rollout or reward is data (`Status.FAILED` with its reason), not an exception: these types
are for what ends a run or a call. All of them pickle, so that they cross process boundaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Root of every error that Slipstream raises on purpose.

    `exit_code` is the status with which the command line ends on it.
    """

    exit_code = 1


class ConfigError(SlipstreamError, ValueError):
    """A setting is unknown, of the wrong type, or impossible together with another."""

    exit_code = 2


class DataError(SlipstreamError, ValueError):
    """A dataset, a prompt or a tokenizer cannot be used as it is."""

    exit_code = 3


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint or run folder is missing, corrupt, newer than this program or of another run."""

    exit_code = 4


class EngineError(SlipstreamError, RuntimeError):
    """An inference engine failed."""

    exit_code = 5


class RequestError(EngineError, ValueError):
    """A generation request is invalid: the message names the field and the limit."""


class RewardError(SlipstreamError, RuntimeError):
    """A reward function failed and the policy for failures is to stop."""

    exit_code = 6


class TrainingError(SlipstreamError, RuntimeError):
    """The update cannot go on."""

    exit_code = 7


class StageTimeoutError(SlipstreamError, TimeoutError):
    """A stage ran past its deadline; the message names the stage and what it waited for."""

    exit_code = 8


def check_at_least_one(settings: object, *names: str, where: str = "") -> None:
    """Refuse counts below 1, or NaN; None is no count. Raises ConfigError after `where`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"{where}{name}={value} must be at least 1")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean near?` with the nearest names, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
