"""Scores in worker processes, which can be killed: verl's `prime` manager.

Python cannot stop a thread. It also runs one thread at a time, so a function that computes blocks
all others. A worker process can be killed, without affecting other calls.
"""

from __future__ import annotations

import functools
import pickle
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import anyio
from anyio import BrokenWorkerProcess, to_process

from slipstream.errors import ConfigError, reason_of
from slipstream.rewards.custom import call_custom, is_custom, located
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Decode, OnFailure, Reward
from slipstream.rewards.results import CallOutcome, Reader, outcome_of
from slipstream.rewards.runner import is_async

_PROCESSES = 4


class PrimeRewardManager(NaiveRewardManager):
    """Naive scoring in `num_workers` reusable processes (default 4).

    A process that does not answer within `timeout_s` is killed. Raises ConfigError for async
    functions, and for functions that cannot be sent to another process.
    """

    in_main_thread = True

    def __init__(
        self,
        compute_score: Callable[..., Any] | Reward = default_compute_score,
        *,
        decode: Decode,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
    ) -> None:
        super().__init__(
            compute_score,
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=_PROCESSES if num_workers is None else num_workers,
        )
        function = compute_score.score if isinstance(compute_score, Reward) else compute_score
        if is_async(function):
            raise ConfigError(
                "reward_model.reward_manager=prime calls functions in processes, but this function "
                "is async; set reward_model.reward_manager=naive"
            )
        self._portable = _portable(function)
        self._killed = 0

    @property
    def timeouts(self) -> int:
        return self._killed

    async def _outcome(
        self, call: functools.partial[Any], reader: Reader, patience: float
    ) -> CallOutcome:
        function = functools.partial(self._portable, *call.args, **call.keywords)
        remote = functools.partial(_call_in_worker, reader, function)
        async with self._runner.slot():
            with anyio.move_on_after(self._runner.timeout_s):
                try:
                    return await to_process.run_sync(remote, cancellable=True)
                except BrokenWorkerProcess:
                    return CallOutcome(failure="the scoring process ended")
                except Exception as error:  # arguments or answer that cannot be sent
                    return outcome_of(error)
        self._killed += 1
        return CallOutcome(failure=f"no answer within {self._runner.timeout_s:g} s")


def _call_in_worker(reader: Reader, function: Callable[..., Any]) -> CallOutcome:
    """Call the function in the worker process and read its result there."""
    # Ctrl-C reaches the whole process group. The run decides what follows, not the worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If the parent has no main file (a notebook), anyio's worker process has no main module, which
    # some imports look for.
    sys.modules.setdefault("__main__", ModuleType("__main__"))
    try:
        return reader.outcome(function)
    except KeyboardInterrupt as error:  # raised by the function
        return CallOutcome(failure=reason_of(error))


def _portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that another process can unpickle. Raises ConfigError if impossible."""
    if is_custom(function):
        inner = function.func if isinstance(function, functools.partial) else function
        bound = function.keywords if isinstance(function, functools.partial) else {}
        return functools.partial(call_custom, *located(inner), **bound)
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"reward_model.reward_manager=prime cannot send {function!r} to another process "
            f"({reason_of(error)}); define it at the top level of a module, or set "
            "reward_model.reward_manager=naive"
        ) from error
    return function
