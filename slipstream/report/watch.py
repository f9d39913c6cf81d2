"""The report of runs that are under way, served on this machine alone, and read as files change.

    GET /            the page
    GET /data.json   its data; 304 while it is what `?have=` names

Knows HTTP and which files a report is read from. Called by the command line.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slipstream.errors import ConfigError
from slipstream.metrics.loggers import METRICS_FILE
from slipstream.metrics.timeline import EVENTS_FILE
from slipstream.report.page import as_json, page, payload, read_runs
from slipstream.report.read import is_running

HOST = "127.0.0.1"
PORT = 6780
"""The default of `slipstream watch`; other ports are tried where none is asked for."""

_TRIED = 20
_log = logging.getLogger(__name__)


class Source:
    """The data of some runs, as JSON, read again only where a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises DataError where a folder holds no run."""
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._reason = ""
        self.tag, self.body = "", b""
        self.data: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the runs, if something of them is other than the last time. Raises DataError."""
        with self._lock:
            now = self._state()
            if self.body and now == self._seen:
                return
            data = payload(read_runs(self._folders))
            text = as_json(data).encode()
            self._seen, self.data, self.body = now, data, gzip.compress(text, 3)
            self.tag = hashlib.blake2b(text, digest_size=8).hexdigest()

    def look(self) -> None:
        """`refresh`, where what was read last is shown on while the run cannot be read: it is about
        to start over, or a file is half there. Each reason is said once."""
        try:
            self.refresh()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if reason != self._reason:
                _log.warning("the run cannot be read now: %s", reason)
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
            # That a run has ended changes no file.
            found.append(is_running(folder))
        return tuple(found)


def make_server(source: Source, port: int | None = None) -> ThreadingHTTPServer:
    """A server of `source` on this machine, not yet serving. Without a `port` the first free one
    from `PORT` on. Raises ConfigError where it is taken."""
    ports = range(PORT, PORT + _TRIED) if port is None else (port,)
    for number in ports:
        try:
            return _Server((HOST, number), _handler(source))
        except OSError as error:
            reason = error
    where = f"port {port} is" if port is not None else f"ports {PORT} to {PORT + _TRIED - 1} are"
    raise ConfigError(
        f"{where} not to be had ({reason}); give another one: slipstream watch --port N"
    )


def _say(text: str) -> None:
    # At once, where somebody reads it through a pipe, too: the address is of no use afterwards.
    print(text, flush=True)


def serve(folders: Sequence[Path], port: int | None, announce: Callable[[str], None] = _say) -> int:
    """Serve the runs in `folders` until Ctrl-C; the exit status."""
    source = Source(folders)
    with make_server(source, port) as server:
        host, number = server.server_address[:2]
        announce(f"watching {', '.join(map(str, folders))}")
        announce(f"open http://{host!s}:{number} (Ctrl-C ends it; the run goes on)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            announce("ended")
    return 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The port of a server that has just ended can be had at once; one that is served cannot.
    allow_reuse_address = True
    allow_reuse_port = False


def _handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            # A page of another site must not read this one through a name of its own.
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
            elif url.path == "/":
                self._page()
            elif url.path == "/data.json":
                self._data(parse_qs(url.query).get("have", [""])[0])
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _page(self) -> None:
            source.look()
            body = gzip.compress(page(source.data, live=True).encode(), 3)
            self._send(body, "text/html; charset=utf-8", source.tag)

        def _data(self, have: str) -> None:
            source.look()
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

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal is for the person."""

    return Handler
