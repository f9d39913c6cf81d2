"""JSON over HTTP to one server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from slipstream.errors import EngineError, shortened
from slipstream.reading import reason

CONNECT_S = 10.0
"""Time limit to connect to a server, in seconds."""


class ServerGoneError(EngineError):
    """The server does not answer: it has ended, or the connection broke."""


class ServerStallsError(ServerGoneError):
    """The server is there, but it generates nothing."""


class ServerRefusedError(EngineError):
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class JsonClient:
    """Requests to a server. It can be used from one event loop after another."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._open: tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient] | None = None

    async def call(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> None:
        """Like `post`, for a route whose answer has no contents that matter. It need not be
        JSON."""
        await self._answer("POST", route, body, timeout_s)

    async def get(self, route: str, *, timeout_s: float | None = None) -> Any:
        return await self._request("GET", route, None, timeout_s)

    async def text(self, route: str, *, timeout_s: float | None = None) -> str:
        """Return the text of the answer. Errors are those of `post`."""
        return (await self._answer("GET", route, None, timeout_s)).text

    async def post(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return the JSON value of the answer; None if the answer is empty.

        Raises ServerGoneError if there is no answer within `timeout_s` seconds (None: no limit),
        and ServerRefusedError for HTTP errors.
        """
        return await self._request("POST", route, body, timeout_s)

    @asynccontextmanager
    async def events(self, route: str, body: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Post, and yield an iterator over the JSON values of a stream of server-sent events."""
        request = self._client().build_request("POST", self.url + route, json=body)
        try:
            answer = await self._client().send(request, stream=True)
        except httpx2.HTTPError as error:
            raise self._gone(route, error) from error
        try:
            if answer.status_code >= 400:
                await answer.aread()
                raise self._refused(route, answer)
            yield self._values(route, answer)
        finally:
            await answer.aclose()

    async def _values(self, route: str, answer: httpx2.Response) -> AsyncIterator[Any]:
        try:
            async for line in answer.aiter_lines():
                text = line.removeprefix("data:").strip()
                if line.startswith("data:") and text != "[DONE]":
                    yield self._parsed(route, text)
        except httpx2.HTTPError as error:
            raise self._gone(route, error) from error

    async def _request(self, method: str, route: str, body: Any, timeout_s: float | None) -> Any:
        answer = await self._answer(method, route, body, timeout_s)
        return self._parsed(route, answer.text) if answer.content.strip() else None

    async def _answer(
        self, method: str, route: str, body: Any, timeout_s: float | None
    ) -> httpx2.Response:
        limits = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        try:
            answer = await self._client().request(
                method, self.url + route, json=body, timeout=limits
            )
        except httpx2.HTTPError as error:
            raise self._gone(route, error) from error
        if answer.status_code >= 400:
            raise self._refused(route, answer)
        return answer

    def _parsed(self, route: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerRefusedError(
                f"{self.url}{route} answered with something that is not JSON: "
                f"{shortened(text)[:200]}; check that the URL is that of the serving engine",
                200,
            ) from error

    def _gone(self, route: str, error: Exception) -> ServerGoneError:
        return ServerGoneError(f"{self.url}{route} does not answer ({reason(error)})")

    def _refused(self, route: str, answer: httpx2.Response) -> ServerRefusedError:
        try:
            value = answer.json()
            found = value.get("error", value.get("detail", value))
            text = found.get("message", found) if isinstance(found, Mapping) else found
        except (ValueError, AttributeError):
            text = answer.text
        return ServerRefusedError(
            f"{self.url}{route} answered {answer.status_code}: {shortened(str(text))[:500]}",
            answer.status_code,
        )

    def _client(self) -> httpx2.AsyncClient:
        # A client belongs to the event loop in which it was first used.
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            # A generation has no time limit. Each request has a connection of its own, which is
            # closed after it: none is left when the event loop ends, and none is used that the
            # server has closed.
            client = httpx2.AsyncClient(
                headers=self._headers,
                timeout=httpx2.Timeout(None, connect=CONNECT_S),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
                # Reading the certificates takes 40 ms, and http needs none.
                verify=not self.url.startswith("http:"),
            )
            self._open = loop, client
        return self._open[1]
