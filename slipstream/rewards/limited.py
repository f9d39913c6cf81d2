"""Scores through a service with rate limits: verl's `rate_limited` manager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.errors import ConfigError
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.limits import Limits
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Decode, OnFailure, Reward
from slipstream.rewards.results import CallOutcome, Reader
from slipstream.rewards.slots import MAX_AT_ONCE


class LimitedRewardManager(NaiveRewardManager):
    """Naive scoring with rate limits (None: no limit).

    At most `max_rpm` calls and `max_tpm` tokens per minute, and `max_concurrent` calls at once. A
    call counts as `estimated_tokens_per_request` tokens. Its deadline starts when the call starts,
    so time spent waiting for the rate limit does not count. All calls of this manager share the
    limits.
    """

    def __init__(
        self,
        compute_score: Callable[..., Any] | Reward = default_compute_score,
        *,
        decode: Decode,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        max_concurrent: int | None = None,
        estimated_tokens_per_request: float = 2000,
    ) -> None:
        super().__init__(
            compute_score,
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=num_workers,
        )
        workers = MAX_AT_ONCE if num_workers is None else num_workers
        if max_concurrent is not None and max_concurrent > workers:
            raise ConfigError(
                f"reward_model.reward_kwargs.max_concurrent={max_concurrent} concurrent calls need "
                f"as many workers, but there are {workers}; set "
                f"reward_model.num_workers={max_concurrent}"
            )
        if not estimated_tokens_per_request > 0:
            raise ConfigError(
                "reward_model.reward_kwargs.estimated_tokens_per_request="
                f"{estimated_tokens_per_request:g}: each call counts as this many tokens of "
                "max_tpm; set it above 0"
            )
        self.limits = Limits(max_rpm=max_rpm, max_tpm=max_tpm, max_concurrent=max_concurrent)
        self._tokens = estimated_tokens_per_request

    async def _outcome(self, call: partial[Any], reader: Reader, patience: float) -> CallOutcome:
        async with self.limits.request(self._tokens):
            return await super()._outcome(call, reader, patience)
