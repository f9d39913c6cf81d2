"""A real HTTP server on this machine that sends prepared responses, including faulty ones."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes | None]
Answers = Answer | Callable[[dict[str, Any]], Answer]
"""An answer, or a function that makes it from the JSON of the request."""


@dataclass
class Server:
    """Sends `answers` (status, headers, body) in order, and repeats the last one.

    With the body None it does not answer until the end; with b"" it closes the connection.
    """

    answers: list[Answers]
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@contextmanager
def serving(*answers: Answers) -> Iterator[Server]:
    state = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.seen.append(json.loads(body))
            state.headers.append(dict(self.headers))
            given = state.answers[0]
            if len(state.answers) > 1:
                state.answers.pop(0)
            status, headers, answer = given(state.seen[-1]) if callable(given) else given
            if answer is None:
                state.over.wait()
                return
            if answer == b"":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/score"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
