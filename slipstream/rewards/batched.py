"""Scoring of many responses in one call: VERL's `batch` manager, and the base of learned reward
models.

Responses end one by one; those that wait while a call runs are scored together by the next. Knows
functions of lists, not what they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anyio

from slipstream.errors import ConfigError
from slipstream.rewards.manager import Decode, NaiveRewardManager, read_result
from slipstream.rewards.protocol import OnFailure, Reward, Score
from slipstream.types import Sample


class BatchRewardManager(NaiveRewardManager):
    """One call at a time, each of all responses that wait, at most `max_batch`.

    `compute_score` takes lists: VERL's `compute_score(data_sources, solution_strs, ground_truths,
    extra_infos)`, TRL's, or one of a `DataProto`. Which responses share a call depends on when they
    end, so a score must not depend on the others; rewards of whole groups are terms
    (`reward_model.terms`, `group: true`). A call that fails is a failure of each of its responses.
    """

    def __init__(
        self,
        compute_score: Callable[..., Any] | Reward,
        *,
        decode: Decode,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
        max_batch: int = 256,
    ) -> None:
        """Raises ConfigError for a function of single responses."""
        super().__init__(
            compute_score,
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=num_workers,
        )
        if not self._signature.many:
            raise ConfigError(
                f"reward_model.reward_manager=batch calls {self._name} with lists, and it takes "
                "one response: give it the parameters data_sources, solution_strs, ground_truths "
                "and extra_infos, or set reward_model.reward_manager=naive"
            )
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise ConfigError(
                f"reward_model.reward_kwargs.max_batch={max_batch} must be a whole number of at "
                "least 1"
            )
        self._max_batch = max_batch
        self._waiting: list[_Waiting] = []
        self._turn = anyio.Lock()

    async def score_sample(self, sample: Sample) -> Score:
        if not self._waiting:
            self._turn = anyio.Lock()  # of the event loop that scores now
        mine = _Waiting(sample)
        self._waiting.append(mine)
        try:
            async with self._turn:
                while mine.result is None:
                    await self._score_waiting()
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        if isinstance(mine.result, str):
            return self._failed(sample, mine.result)
        return self.finish(sample, mine.result)

    async def _score_waiting(self) -> None:
        """Score the responses that have waited longest. Where that is cancelled they wait on."""
        batch = self._waiting[: self._max_batch]
        samples = [one.sample for one in batch]
        assert self._compute_score is not None
        texts = [self._decode(sample.response_ids) for sample in samples]
        arguments = self._signature.arguments(samples, texts)
        outcome = await self._outcome(functools.partial(self._compute_score, **arguments))
        results: list[Score | str]
        if outcome.failure is not None:
            results = [outcome.failure] * len(batch)
        else:
            try:
                returned = self._signature.results(outcome.value, len(batch))
                results = [read_result(value) for value in returned]
            except ValueError as error:
                results = [str(error)] * len(batch)
        for one, result in zip(batch, results, strict=True):
            one.result = result
            if one in self._waiting:  # else its caller has given up
                self._waiting.remove(one)


class _Waiting:
    """A response, and what came of it: a score, or why there is none."""

    __slots__ = ("result", "sample")

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.result: Score | str | None = None
