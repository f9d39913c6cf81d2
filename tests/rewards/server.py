"""A real server on this machine, which misbehaves as it is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes | None]


@dataclass
class Server:
    """Answers in turn (status, headers, body); the last one again and again. A body of None: never,
    until the end; of b"": it hangs up."""

    answers: list[Answer]
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    told = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.seen.append(json.loads(body))
            told.headers.append(dict(self.headers))
            status, headers, answer = told.answers[0]
            if len(told.answers) > 1:
                told.answers.pop(0)
            if answer is None:
                told.over.wait()
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
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_address[1]}/score"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield told
    finally:
        told.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
