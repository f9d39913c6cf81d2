"""Reward managers: compute the score of a finished sample, and handle failing reward functions.

If a function raises, hangs or returns an invalid value, the result is a failure with a reason, and
`on_failure` decides what follows. Knows samples and decoding (passed in), not rollouts or
advantages. Called by the rollout manager and by evaluation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

import anyio

from slipstream.errors import ConfigError, RewardError, shortened
from slipstream.rewards.functions import (
    default_compute_score,
    is_program,
    sandbox_of,
    worker_pool_of,
)
from slipstream.rewards.protocol import (
    PRIME,
    SCORE_PART,
    Decode,
    OnFailure,
    Reward,
    Score,
    response_text,
)
from slipstream.rewards.results import (
    NOT_APPLICABLE,
    CallOutcome,
    Reader,
    outcome_of,
    read_result,
)
from slipstream.rewards.runner import DeadlineRunner, is_async
from slipstream.rewards.sandbox.watched import PATIENCE
from slipstream.rewards.signatures import Signature, TRLSignature, VerlSignature, signature_of
from slipstream.rewards.slots import Slots
from slipstream.rewards.trl import logs_of
from slipstream.rewards.workers import WorkerPool
from slipstream.types import Sample

__all__ = ["DAPORewardManager", "Decode", "NaiveRewardManager", "compute_reward", "read_result"]

_ON_FAILURE = ("zero", "drop", "stop")
_NEEDS_MAIN_THREAD = re.compile(r"main thread|threaded environment|event loop in thread", re.I)
"""Texts of errors that Python and math-verify raise if a function uses signals in a thread."""
_USE_PRIME = (
    "the reward function needs the main thread of a process, and its calls run in threads; set "
    f"{PRIME}"
)


class NaiveRewardManager:
    """Scores each sample independently with one function.

    `compute_score` has verl's or TRL's signature (see `rewards.signatures`), or is a `Reward`,
    which gets the whole sample. `decode` turns response ids into text.
    `timeout_s` is the deadline of one call, counted from its start. `num_workers` is the number of
    concurrent calls; None is four, and more while the running calls only wait (`rewards.slots`).
    `failures` and `timeouts` are counts since the start.
    """

    in_main_thread = False
    """Whether functions are called in the main thread of a process."""

    def __init__(
        self,
        compute_score: Callable[..., Any] | Reward = default_compute_score,
        *,
        decode: Decode,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
    ) -> None:
        if on_failure not in _ON_FAILURE:
            raise ConfigError(
                f"reward_model.on_failure {on_failure!r} is unknown; use {', '.join(_ON_FAILURE)}"
            )
        self.failures = 0
        self.none_fails = True
        """Whether the result None is a failure. In a sum (`terms`) it is not: other terms count."""
        self._decode = decode
        self._on_failure = on_failure
        self._runner = DeadlineRunner(timeout_s=timeout_s, num_workers=num_workers)
        self._reward = compute_score if isinstance(compute_score, Reward) else None
        self._compute_score = None if isinstance(compute_score, Reward) else compute_score
        self._signature: Signature = (
            VerlSignature() if isinstance(compute_score, Reward) else signature_of(compute_score)
        )
        sandbox = None if self._compute_score is None else sandbox_of(self._compute_score)
        self._programs = None if sandbox is None else Slots(sandbox.at_once, dict)
        self._workers: dict[WorkerPool, Slots] = {}
        target = compute_score.score if isinstance(compute_score, Reward) else compute_score
        self._asynchronous = is_async(target)
        self._name = _name(compute_score)

    @property
    def timeouts(self) -> int:
        """Number of calls that exceeded the deadline."""
        return self._runner.timeouts

    @property
    def abandoned(self) -> int:
        """Number of calls that exceeded the deadline and still run in a thread."""
        return self._runner.abandoned

    def expect_steps(self, total: int | None) -> None:
        """Set the number of steps of the run, for functions that take TRL's `trainer_state`."""
        if isinstance(self._signature, TRLSignature):
            self._signature.max_steps = total

    async def score_sample(self, sample: Sample) -> Score:
        """Return the score of a finished sample. Does not change the sample (see `apply_score`).

        Raises RewardError on a failure under the policy "stop", if the function raises RewardError
        (for example, no reward for this data source), and if too many calls hang.
        """
        (result,) = await self._results([sample])
        if isinstance(result, str):
            return self._failed(sample, result)
        return self.finish(sample, result)

    def _place(self, sample: Sample) -> AbstractAsyncContextManager[None]:
        """Return a context to hold during a call.

        Calls wait there, before their deadline begins, until the sandbox or a worker is free.
        """
        if self._programs is None:
            return nullcontext()
        if is_program(sample.data_source):
            return self._programs.one()
        if (pool := worker_pool_of(sample.data_source)) is not None:
            return self._workers.setdefault(pool, Slots(pool.size, dict)).one()
        return nullcontext()

    async def _results(self, samples: Sequence[Sample]) -> list[Score | str]:
        """Call the function on the samples. Return a score or the reason of a failure for each."""
        call = self._call(samples)
        if isinstance(call, CallOutcome):
            return call.each(len(samples))
        reader = Reader(self._signature, len(samples), logs_of(call.keywords))
        async with self._place(samples[0]):
            program = self._programs is not None and is_program(samples[0].data_source)
            outcome = await self._outcome(call, reader, PATIENCE if program else 1.0)
        return outcome.each(len(samples))

    async def _outcome(
        self, call: functools.partial[Any], reader: Reader, patience: float
    ) -> CallOutcome:
        return await self._runner.run(
            call,
            name=self._name,
            asynchronous=self._asynchronous,
            reader=reader,
            patience=patience,
        )

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample, in order. They are computed concurrently.

        Raises the first RewardError, after cancelling the other calls.
        """
        scores: list[Score | None] = [None] * len(samples)
        errors: list[RewardError] = []

        async def one(place: int, scope: anyio.CancelScope) -> None:
            try:
                scores[place] = await self.score_sample(samples[place])
            except RewardError as error:
                errors.append(error)
                scope.cancel()

        async with anyio.create_task_group() as group:
            for place in range(len(samples)):
                group.start_soon(one, place, group.cancel_scope)
        if errors:
            raise errors[0]
        return [score for score in scores if score is not None]

    def finish(self, sample: Sample, score: Score) -> Score:
        """Hook for subclasses that adjust a successful score."""
        return score

    def _call(self, samples: Sequence[Sample]) -> functools.partial[Any] | CallOutcome:
        """Return the call for the samples, or its failure if the data do not fit the function."""
        if self._reward is not None:
            return functools.partial(self._reward.score, samples[0])
        assert self._compute_score is not None
        responses = [response_text(sample, self._decode) for sample in samples]
        try:
            arguments = self._signature.arguments(samples, responses)
            return functools.partial(self._compute_score, **arguments)
        except Exception as error:  # for example, columns whose names are not strings
            return outcome_of(error)

    def _failed(self, sample: Sample, reason: str) -> Score:
        if reason == NOT_APPLICABLE and not self.none_fails:
            return Score(0.0, failure=NOT_APPLICABLE)
        self.failures += 1
        reason = shortened(reason)
        if not self.in_main_thread and _NEEDS_MAIN_THREAD.search(reason):
            reason = f"{_USE_PRIME} ({reason})"
        if self._on_failure == "stop":
            raise RewardError(
                f"the reward function {self._name} failed on sample {sample.uid!r} (data_source "
                f"{sample.data_source!r}): {reason}. Fix it, or set reward_model.on_failure to "
                "zero or drop"
            )
        return Score(0.0, ok=self._on_failure == "zero", failure=reason)


class DAPORewardManager(NaiveRewardManager):
    """Naive scoring plus DAPO's soft penalty for overlong responses (Yu et al. 2025, eq. 13).

    The last `len` of `max_resp_len` tokens are a buffer. A response that uses x buffer tokens gets
    a penalty of `-penalty_factor * x / len`. `overlong_buffer_cfg` has verl's keys: enable, len,
    penalty_factor, and log (add the reward parts `overlong` and `overlong_reward`).
    """

    def __init__(
        self,
        compute_score: Callable[..., Any] | Reward = default_compute_score,
        *,
        decode: Decode,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            compute_score,
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=num_workers,
        )
        config = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}
        unknown = sorted(set(overlong_buffer_cfg or {}) - set(config))
        if unknown:
            raise ConfigError(
                f"reward_model.reward_kwargs.overlong_buffer_cfg: unknown {', '.join(unknown)} "
                f"(known: {', '.join(config)})"
            )
        config.update(overlong_buffer_cfg or {})
        self._penalise = bool(config["enable"])
        self._log = bool(config["log"])
        self._buffer = int(config["len"])
        self._factor = float(config["penalty_factor"])
        self._max_resp_len = max_resp_len or 0
        if self._penalise and not 0 < self._buffer <= self._max_resp_len:
            raise ConfigError(
                f"reward_model.reward_kwargs: overlong_buffer_cfg.len {self._buffer} must be "
                f"between 1 and max_resp_len ({max_resp_len}); set "
                "reward_model.reward_kwargs.max_resp_len to data.max_response_length"
            )

    def finish(self, sample: Sample, score: Score) -> Score:
        if not score.parts:
            # Keep the unpenalized score as `acc`, as in verl, for filters and validation.
            score = replace(score, parts={"acc": score.value})
        if not self._penalise:
            return score
        over = sample.response_length - (self._max_resp_len - self._buffer)
        penalty = min(-over / self._buffer * self._factor, 0.0)
        parts = dict(score.parts)
        if self._log:
            parts |= {"overlong": float(penalty < 0.0), "overlong_reward": penalty}
        return replace(score, value=score.value + penalty, parts=parts)


def _name(compute_score: Any) -> str:
    inner = compute_score
    while isinstance(inner, functools.partial):
        inner = inner.func
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def compute_reward(sample: Sample) -> float:
    """Return the reward of a sample that was scored, or graded by its environment.

    A scored sample (see `apply_score`) has a reward. For another sample the result is 1.0 or 0.0,
    depending on `metadata["correct"]`. Raises RewardError if it has neither.
    """
    if SCORE_PART in sample.reward_parts:
        return sample.reward
    if "correct" in sample.metadata:
        return 1.0 if sample.metadata["correct"] else 0.0
    raise RewardError(
        f"sample {sample.uid!r} has no reward: score it with a reward manager, or let its "
        "environment set metadata['correct']"
    )
