"""Scoring by a service that allows so many requests: VERL's `rate_limited` manager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.errors import ConfigError
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.limits import Limits
from slipstream.rewards.manager import Decode, NaiveRewardManager
from slipstream.rewards.protocol import OnFailure, Reward
from slipstream.rewards.runner import CallOutcome
from slipstream.rewards.slots import MOST


class LimitedRewardManager(NaiveRewardManager):
    """Naive scoring, no faster than `max_rpm` calls and `max_tpm` tokens a minute, and at most
    `max_concurrent` calls at once (None: no limit).

    A call counts as `estimated_tokens_per_request` tokens. Its deadline begins when it does: what
    waits for its turn is not late. One budget for all that this manager scores.
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
        workers = MOST if num_workers is None else num_workers
        if max_concurrent is not None and max_concurrent > workers:
            raise ConfigError(
                f"reward_model.reward_kwargs.max_concurrent={max_concurrent} calls at once need as "
                f"many workers; set reward_model.num_workers={max_concurrent} (there are {workers})"
            )
        if not estimated_tokens_per_request > 0:
            raise ConfigError(
                "reward_model.reward_kwargs.estimated_tokens_per_request="
                f"{estimated_tokens_per_request:g}: a call counts as that many tokens of max_tpm; "
                "set it above 0"
            )
        self.limits = Limits(max_rpm=max_rpm, max_tpm=max_tpm, max_concurrent=max_concurrent)
        self._tokens = estimated_tokens_per_request

    async def _outcome(self, call: partial[Any]) -> CallOutcome:
        async with self.limits.request(self._tokens):
            return await super()._outcome(call)
