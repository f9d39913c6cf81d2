"""Serves the report of runs in progress on localhost, and rereads it when files change.

    GET /            the page
    GET /data.json   its data; status 304 if `?have=` is the tag of the current data

Knows HTTP, and which files a report depends on. Called by the command line.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slipstream.errors import ConfigError
from slipstream.metrics.loggers import METRICS_FILE
from slipstream.metrics.timeline import EVENTS_FILE
from slipstream.report.page import as_json, page, payload, read_runs, security_policy
from slipstream.report.read import is_running

HOST = "127.0.0.1"
PORT = 6780
"""The default port of `slipstream watch`; if it is taken, the next ones are tried."""

REQUEST_S = 10.0
"""Seconds from the start of a connection until its request must be complete."""

REPLY_S = 30.0
"""Seconds from a complete request until its reply must be sent."""

MAX_CONNECTIONS = 32
"""Maximum number of open connections, each of which has a thread."""

_TRIED = 20
_log = logging.getLogger(__name__)


class Source:
    """The data of some runs as JSON, reread only if a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read the runs. Raises DataError if a folder contains no run."""
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._reason = ""
        self.tag, self.body = "", b""
        self.data: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the runs again if a file of them has changed. Raises DataError."""
        with self._lock:
            now = self._state()
            if self.body and now == self._seen:
                return
            data = payload(read_runs(self._folders))
            text = as_json(data).encode()
            self._seen, self.data, self.body = now, data, gzip.compress(text, 3)
            self.tag = hashlib.blake2b(text, digest_size=8).hexdigest()

    def try_refresh(self) -> None:
        """Call `refresh`; on an error keep the previous data and log each new reason once.

        A run cannot be read while it starts over or while one of its files is incomplete.
        """
        try:
            self.refresh()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if reason != self._reason:
                _log.warning("the run cannot be read at the moment: %s", reason)
            self._reason = reason
        else:
            self._reason = ""

    def _state(self) -> tuple[object, ...]:
        logs = (METRICS_FILE, f"sft/{METRICS_FILE}", f"draft/{METRICS_FILE}")
        names = (*logs, EVENTS_FILE)
        found: list[object] = []
        for folder in self._folders:
            for name in names:
                try:
                    info = (folder / name).stat()
                except OSError:
                    found.append(None)
                else:
                    found.append((info.st_size, info.st_mtime_ns, info.st_ino))
            # The end of a run changes no file, only the lock.
            found.append(is_running(folder))
        return tuple(found)


def make_server(source: Source, port: int | None = None) -> ThreadingHTTPServer:
    """Return a server of `source` on localhost that is not yet serving.

    `port` None is the first free port from `PORT` on. Raises ConfigError if no port is free.
    """
    reason: Exception | None = None
    ports = range(PORT, PORT + _TRIED) if port is None else (port,)
    for number in ports:
        try:
            return _Server((HOST, number), _handler(source))
        except (OSError, OverflowError) as error:  # OverflowError: no port has this number
            reason = error
    where = f"port {port} is" if port is not None else f"ports {PORT} to {PORT + _TRIED - 1} are"
    raise ConfigError(
        f"{where} not available ({reason}); give another one: slipstream watch --port N"
    )


def _print_now(text: str) -> None:
    # Flushed, because the reader of a pipe needs the address while the server runs.
    print(text, flush=True)


def serve(
    folders: Sequence[Path], port: int | None, announce: Callable[[str], None] = _print_now
) -> int:
    """Serve the runs in `folders` until Ctrl-C. Returns the exit status."""
    source = Source(folders)
    with make_server(source, port) as server:
        host, number = server.server_address[:2]
        announce(f"watching {', '.join(map(str, folders))}")
        announce(f"open http://{host!s}:{number} (Ctrl-C stops the server, not the run)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            announce("stopped")
    return 0


@dataclass(slots=True)
class _Connection:
    """An open connection. It is closed at the time `end`. `asked`: its request is complete."""

    end: float
    asked: bool = False


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread, and closes connections that take too long."""

    daemon_threads = True
    # Reuse the port of a server that has just ended, but never that of a running server.
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(self, *args: Any) -> None:
        self._open: dict[Any, _Connection] = {}
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection. If there are too many, close the oldest one without a request."""
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            idle = next((each for each, state in self._open.items() if not state.asked), None)
            if full and idle is not None:
                del self._open[idle]
                _disconnect(idle)
                full = False
            if not full:
                self._open[request] = _Connection(time.monotonic() + REQUEST_S)
        if full:
            super().shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def replying(self, request: Any) -> None:
        """Note that the request of a connection is complete."""
        with self._lock:
            if (state := self._open.get(request)) is not None:
                state.asked, state.end = True, time.monotonic() + REPLY_S

    def service_actions(self) -> None:
        """Close the connections whose time is over. Called several times per second."""
        now = time.monotonic()
        with self._lock:
            for request, state in self._open.items():
                if state.end <= now:
                    _disconnect(request)  # its thread wakes up and removes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback: clients may disconnect at any time."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.warning("a request failed with %s: %s", type(error).__name__, error)


def _disconnect(request: socket.socket) -> None:
    """End a connection, also if another thread waits for it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, _Server)
            self.server.replying(self.connection)
            try:
                url = urlsplit(self.path)
            except ValueError:
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            # Prevents DNS rebinding: a foreign site could point its own name at this server.
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
            elif url.path == "/":
                self._page()
            elif url.path == "/data.json":
                self._data(parse_qs(url.query).get("have", [""])[0])
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _page(self) -> None:
            source.try_refresh()
            body = gzip.compress(page(source.data, live=True).encode(), 3)
            self._send(body, "text/html; charset=utf-8", source.tag)

        def _data(self, have: str) -> None:
            source.try_refresh()
            if have == source.tag:
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self.end_headers()
                return
            self._send(source.body, "application/json", source.tag)

        def _send(self, body: bytes, kind: str, tag: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", security_policy())
            self.send_header("X-Content-Type-Options", "nosniff")
            super().end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal is for the user."""

    return Handler
