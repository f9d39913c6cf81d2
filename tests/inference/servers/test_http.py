"""JSON over HTTP, against a small server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest

from slipstream.inference.servers.http import JsonClient, ServerGoneError, ServerRefusedError


class Handler(BaseHTTPRequestHandler):
    """Answers by the route that is asked for."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        self.answer(json.loads(self.rfile.read(size) or "null"))

    def answer(self, body: Any) -> None:
        if self.path == "/hang":
            threading.Event().wait(0.5)
            return
        if self.path == "/gone":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        key = self.headers.get("authorization")
        status, text = {
            "/echo": (200, json.dumps({"body": body, "key": key})),
            "/empty": (200, ""),
            "/page": (200, "<html>not JSON</html>"),
            "/vllm": (400, '{"error": {"message": "top_p is wrong", "code": 400}}'),
            "/starlette": (404, '{"detail": "Not Found"}'),
            "/list": (500, "[1, 2]"),
            "/plain": (503, "no engine"),
            "/events": (200, 'data: {"a": 1}\n\n: a comment\n\ndata: [2]\n\ndata: [DONE]\n\n'),
            "/bad-events": (200, 'data: {"a": 1}\n\ndata: {"a"\n\n'),
            "/cut-events": (200, 'data: {"a": 1}\n\n'),
        }[self.path]
        self.send_response(status)
        extra = 9 if self.path == "/cut-events" else 0
        self.send_header("content-length", str(len(text) + extra))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def post(client: JsonClient, route: str, body: Any = None, timeout_s: float | None = 10) -> Any:
    async def one() -> Any:
        return await client.post(route, body, timeout_s=timeout_s)

    return anyio.run(one)


def test_values_go_out_and_come_back(url: str) -> None:
    client = JsonClient(url + "/", headers={"Authorization": "Bearer k"})
    assert client.url == url
    # One client serves one event loop after another.
    for body in ({"ids": [1, 2]}, {"x": 1e-45}):
        assert post(client, "/echo", body) == {"body": body, "key": "Bearer k"}
    assert post(client, "/empty") is None
    assert anyio.run(client.get, "/echo") == {"body": None, "key": "Bearer k"}


@pytest.mark.parametrize(
    ("route", "status", "text"),
    [
        ("/vllm", 400, "top_p is wrong"),
        ("/starlette", 404, "Not Found"),
        ("/list", 500, "[1, 2]"),
        ("/plain", 503, "no engine"),
        ("/page", 200, "not JSON"),
    ],
)
def test_refusals_have_url_status_and_reason(url: str, route: str, status: int, text: str) -> None:
    with pytest.raises(ServerRefusedError) as caught:
        post(JsonClient(url), route)
    assert caught.value.status == status
    assert url + route in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(("route", "timeout_s"), [("/hang", 0.05), ("/gone", 10)])
def test_a_server_that_does_not_answer_is_gone(url: str, route: str, timeout_s: float) -> None:
    with pytest.raises(ServerGoneError, match=url + route):
        post(JsonClient(url), route, timeout_s=timeout_s)


def test_nobody_at_the_address_is_gone() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with pytest.raises(ServerGoneError, match=f"127.0.0.1:{port}/echo does not answer"):
        post(JsonClient(f"http://127.0.0.1:{port}"), "/echo")


def events(url: str, route: str) -> list[Any]:
    found: list[Any] = []

    async def read() -> None:
        async with JsonClient(url).events(route, {}) as values:
            async for value in values:
                found.append(value)

    try:
        anyio.run(read)
    except Exception as error:
        found.append(error)
    return found


def test_events_are_read_as_they_come(url: str) -> None:
    assert events(url, "/events") == [{"a": 1}, [2]]


@pytest.mark.parametrize(
    ("route", "kind", "before"),
    [
        ("/plain", ServerRefusedError, []),
        ("/gone", ServerGoneError, []),
        ("/bad-events", ServerRefusedError, [{"a": 1}]),
        ("/cut-events", ServerGoneError, [{"a": 1}]),
    ],
)
def test_a_stream_that_fails_says_why(
    url: str, route: str, kind: type[Exception], before: list[Any]
) -> None:
    *values, error = events(url, route)
    assert values == before
    assert type(error) is kind
    assert url + route in str(error)
