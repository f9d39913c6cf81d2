"""Scores through an HTTP service that may be slow, busy or temporarily down.

A call is a POST request with verl's arguments as JSON. The response is a number, or a mapping with
key `score`. Temporary failures (no connection, timeout, status 408, 425, 429, 5xx) are retried
after a pause that doubles each time, or after the time in `Retry-After` if that is longer. What the
service sends is bounded: the size of a reply before and after decompression, its depth, and
`Retry-After`.
"""

from __future__ import annotations

import functools
import json
import math
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2

from slipstream.errors import ConfigError, shortened
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.limited import LimitedRewardManager
from slipstream.rewards.protocol import Decode, OnFailure
from slipstream.rewards.results import CallOutcome, Reader, outcome_of

_RETRIABLE = frozenset({408, 425, 429})

MAX_REPLY = 1_000_000
"""Maximum number of bytes of a reply, before and after decompression."""

MAX_RETRY_AFTER_S = 300.0
"""Maximum number of seconds that a `Retry-After` header can delay a retry."""

_SHOWN = 200
"""Maximum number of characters of a reply in a failure's reason."""

_MAX_DOUBLINGS = 60
"""Number of doublings after which a pause no longer grows. More would overflow a float."""


class _BadReplyError(Exception):
    """A reply is too large or has an unknown compression. The message is the reason."""


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
        if not _is_address(url):
            raise ConfigError(
                f"reward_model.reward_kwargs.url={shortened(str(url), _SHOWN)!r} is not an "
                "address; give one like http://localhost:8000/score"
            )
        if max_retries < 0 or not 0 < backoff_s <= max_backoff_s < math.inf:
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

    async def _outcome(
        self, call: functools.partial[Any], reader: Reader, patience: float
    ) -> CallOutcome:
        # The limits apply to attempts, so `limits.request` is in `_attempt`, not here.
        try:
            body = json.dumps(call.keywords, default=str).encode()
        except Exception as error:  # data that JSON cannot hold, for example with cycles
            return outcome_of(error)
        for attempt in range(1, self._attempts + 1):
            outcome, pause = await self._attempt(body, reader)
            if pause is None:
                return outcome
            if attempt == self._attempts:
                tries = f" after {attempt} attempts" if attempt > 1 else ""
                return CallOutcome(failure=f"{outcome.failure}{tries}")
            self.retries += 1
            doubled = self._pause * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS)
            await self._sleep(max(pause, min(doubled, self._longest_pause)))
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, body: bytes, reader: Reader) -> tuple[CallOutcome, float | None]:
        """Return the outcome, and the minimum pause in seconds before a retry (None: no retry)."""
        async with self.limits.request(self._tokens), self._runner.slot(waits=True):
            with anyio.move_on_after(self._runner.timeout_s):
                try:
                    reply = await self._post(body)
                except _BadReplyError as error:
                    return CallOutcome(failure=str(error)), None
                except (httpx2.HTTPError, OSError) as error:
                    return outcome_of(error), 0.0
                except Exception as error:  # headers that cannot be sent, a broken reply
                    return outcome_of(error), None
                return _answer(reply, reader)
        self._late += 1
        return CallOutcome(failure=f"no answer within {self._runner.timeout_s:g} s"), 0.0

    async def _post(self, body: bytes) -> _Reply:
        # Replies are short, so compression would only cost time.
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **self._headers,
        }
        async with (
            httpx2.AsyncClient(verify=self._ssl, timeout=None) as client,
            client.stream("POST", self._url, content=body, headers=headers) as response,
        ):
            content = b""
            # The client's own decoder has no limit: 1 MB of gzip can hold 1 GB.
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MAX_REPLY:
                    raise _BadReplyError(
                        f"HTTP {response.status_code}: the reply is longer than {MAX_REPLY:,} bytes"
                    )
            encoding = response.headers.get("Content-Encoding", "identity")
            return _Reply(
                response.status_code,
                _decompressed(content, encoding),
                _seconds(response.headers.get("Retry-After", "0")),
            )


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply. `retry_after` are seconds between 0 and `MAX_RETRY_AFTER_S`."""

    status: int
    content: bytes
    retry_after: float


def _answer(reply: _Reply, reader: Reader) -> tuple[CallOutcome, float | None]:
    """Return the outcome, and the minimum pause in seconds before a retry (None: no retry)."""
    status = reply.status
    shown = reply.content[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN].strip()
    if status in _RETRIABLE or status >= 500:
        return CallOutcome(failure=f"HTTP {status}: {shown}"), reply.retry_after
    if status != 200:
        return CallOutcome(failure=f"HTTP {status}: {shown}"), None
    try:
        value = json.loads(reply.content)
    except (ValueError, RecursionError):
        return CallOutcome(failure=f"answered with what is no JSON: {shown!r}"), None
    return reader.outcome(lambda: value), None


def _decompressed(content: bytes, encoding: str) -> bytes:
    """Return at most `MAX_REPLY` bytes. Raises _BadReplyError for a longer or broken content."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return content
    if name not in ("gzip", "x-gzip", "deflate"):
        raise _BadReplyError(
            f"the reply has the Content-Encoding {shortened(name, _SHOWN)!r}; use gzip or none"
        )
    # 32: zlib recognizes the headers of gzip and deflate.
    decoder = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
    try:
        decoded = decoder.decompress(content, MAX_REPLY + 1)
    except zlib.error as error:
        raise _BadReplyError(f"the reply is not {name}: {error}") from error
    if len(decoded) > MAX_REPLY:
        raise _BadReplyError(f"the decompressed reply is longer than {MAX_REPLY:,} bytes")
    return decoded


def _seconds(retry_after: str) -> float:
    """Return the seconds in `Retry-After`, at most `MAX_RETRY_AFTER_S`.

    0 if they are negative or not finite, and if the header is a date.
    """
    try:
        seconds = float(retry_after)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else 0.0


def _is_address(url: object) -> bool:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return False
    try:
        return bool(httpx2.URL(url).host)
    except (httpx2.InvalidURL, ValueError):
        return False
