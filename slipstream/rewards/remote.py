"""Scores through an HTTP service that may be slow, busy or temporarily down.

A call is a POST request with verl's arguments as JSON. The response is a number, or a mapping with
key `score`. Temporary failures (no connection, timeout, status 408, 425, 429, 5xx) are retried
after a pause that doubles each time, or after the time in `Retry-After` if that is longer.
"""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import httpx2

from slipstream.errors import ConfigError
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.limited import LimitedRewardManager
from slipstream.rewards.manager import Decode
from slipstream.rewards.protocol import OnFailure
from slipstream.rewards.runner import CallOutcome, failure_of

_RETRIABLE = frozenset({408, 425, 429})


class RemoteRewardManager(LimitedRewardManager):
    """Scores by POST requests to `url` with `headers`.

    `timeout_s` is the deadline of one attempt. Up to `max_retries` retries follow the first
    attempt; the pause before the n-th is `backoff_s` * 2^(n-1) seconds, at most `max_backoff_s`.
    The rate limits are those of `LimitedRewardManager`; every attempt counts. `retries` is the
    count since the start.
    """

    def __init__(
        self,
        compute_score: Callable[..., Any] = default_compute_score,
        *,
        decode: Decode,
        url: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "zero",
        num_workers: int | None = None,
        max_retries: int = 16,
        backoff_s: float = 1.0,
        max_backoff_s: float = 30.0,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        max_concurrent: int | None = None,
        estimated_tokens_per_request: float = 2000,
    ) -> None:
        super().__init__(
            decode=decode,
            timeout_s=timeout_s,
            on_failure=on_failure,
            num_workers=num_workers,
            max_rpm=max_rpm,
            max_tpm=max_tpm,
            max_concurrent=max_concurrent,
            estimated_tokens_per_request=estimated_tokens_per_request,
        )
        if getattr(compute_score, "func", compute_score) is not default_compute_score:
            raise ConfigError(
                f"reward_model.reward_manager=remote scores at {url}, but "
                "custom_reward_function.path names a local function too; unset one of them"
            )
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"reward_model.reward_kwargs.url={url!r} is not an address; give one like "
                "http://localhost:8000/score"
            )
        if max_retries < 0 or backoff_s <= 0 or max_backoff_s < backoff_s:
            raise ConfigError(
                f"reward_model.reward_kwargs: max_retries={max_retries}, backoff_s={backoff_s:g}, "
                f"max_backoff_s={max_backoff_s:g}: max_retries must be 0 or more, backoff_s above "
                "0, and max_backoff_s at least backoff_s"
            )
        self.retries = 0
        self._name = url
        self._url, self._headers = url, dict(headers or {})
        self._attempts = 1 + max_retries
        self._pause, self._longest_pause = backoff_s, max_backoff_s
        self._sleep = sleep
        self._late = 0
        # Created once: reading the system's certificates can take longer than a request.
        self._ssl = ssl.create_default_context() if url.startswith("https") else False

    @property
    def timeouts(self) -> int:
        return self._late

    async def _outcome(self, call: functools.partial[Any]) -> CallOutcome:
        # The limits apply to attempts, so `limits.request` is in `_attempt`, not here.
        body = json.dumps(call.keywords, default=str).encode()
        for attempt in range(1, self._attempts + 1):
            outcome, pause = await self._attempt(body)
            if pause is None:
                return outcome
            if attempt == self._attempts:
                tries = f" after {attempt} attempts" if attempt > 1 else ""
                return CallOutcome(failure=f"{outcome.failure}{tries}")
            self.retries += 1
            doubled = min(self._pause * 2 ** (attempt - 1), self._longest_pause)
            await self._sleep(max(pause, doubled))
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, body: bytes) -> tuple[CallOutcome, float | None]:
        """Return the outcome, and the minimum pause in seconds before a retry (None: no retry)."""
        async with self.limits.request(self._tokens), self._runner.slot(waits=True):
            with anyio.move_on_after(self._runner.timeout_s):
                try:
                    response = await self._post(body)
                except httpx2.HTTPError as error:
                    return CallOutcome(failure=failure_of(error)), 0.0
                return self._answer(response)
        self._late += 1
        return CallOutcome(failure=f"no answer within {self._runner.timeout_s:g} s"), 0.0

    async def _post(self, body: bytes) -> httpx2.Response:
        headers = {"Content-Type": "application/json", **self._headers}
        async with httpx2.AsyncClient(verify=self._ssl, timeout=None) as client:
            return await client.post(self._url, content=body, headers=headers)

    def _answer(self, response: httpx2.Response) -> tuple[CallOutcome, float | None]:
        status = response.status_code
        body = response.text[:200].strip()
        if status in _RETRIABLE or status >= 500:
            return CallOutcome(failure=f"HTTP {status}: {body}"), _retry_after(response)
        if status != 200:
            return CallOutcome(failure=f"HTTP {status}: {body}"), None
        try:
            return CallOutcome(value=response.json()), None
        except ValueError:
            return CallOutcome(failure=f"answered with what is no JSON: {body!r}"), None


def _retry_after(response: httpx2.Response) -> float:
    """Return the seconds in `Retry-After`; 0 if it is missing or a date."""
    try:
        return max(float(response.headers.get("Retry-After", "0")), 0.0)
    except ValueError:
        return 0.0
