"""Scores many responses in one call: verl's `batch` manager, and the base of learned reward models.

Responses finish one at a time. Those that finish during a call are scored together by the next
call. Knows functions of lists, not what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from slipstream.errors import ConfigError
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Decode, OnFailure, Reward, Score
from slipstream.types import Sample


class BatchRewardManager(NaiveRewardManager):
    """Runs one call at a time, for all pending responses, but at most `max_batch`.

    `compute_score` takes lists: verl's `compute_score(data_sources, solution_strs, ground_truths,
    extra_infos)`, TRL's signature, or a `DataProto`. Which responses share a call depends on when
    they finish, so a score must not depend on the other responses. For rewards that compare the
    responses of a group use terms (`reward_model.terms`, `group: true`). If a call fails, all its
    responses fail.
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
        """Raises ConfigError if `compute_score` takes single responses."""
        super().__init__(
            compute_score,
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=num_workers,
        )
        if not self._signature.many:
            raise ConfigError(
                f"reward_model.reward_manager=batch calls {self._name} with lists, but it takes "
                "one response: give it the parameters data_sources, solution_strs, ground_truths "
                "and extra_infos, or set reward_model.reward_manager=naive"
            )
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise ConfigError(
                f"reward_model.reward_kwargs.max_batch={max_batch} must be an integer of 1 or more"
            )
        self._max_batch = max_batch
        self._pending: list[_PendingSample] = []
        self._call_lock = anyio.Lock()

    async def score_sample(self, sample: Sample) -> Score:
        if not self._pending:
            self._call_lock = anyio.Lock()  # locks belong to an event loop, which may be a new one
        mine = _PendingSample(sample)
        self._pending.append(mine)
        try:
            async with self._call_lock:
                while mine.result is None:
                    await self._score_pending()
        finally:
            if mine in self._pending:
                self._pending.remove(mine)
        if isinstance(mine.result, str):
            return self._failed(sample, mine.result)
        return self.finish(sample, mine.result)

    async def _score_pending(self) -> None:
        """Score the oldest pending responses. If the call is cancelled, they stay pending."""
        batch = self._pending[: self._max_batch]
        results = await self._results([one.sample for one in batch])
        for one, result in zip(batch, results, strict=True):
            one.result = result
            if one in self._pending:  # else its caller was cancelled
                self._pending.remove(one)


class _PendingSample:
    """A sample, and its result: a score, a failure reason, or None until it is scored."""

    __slots__ = ("result", "sample")

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.result: Score | str | None = None
