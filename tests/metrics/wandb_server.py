"""A minimal W&B server: what W&B's client needs to log metrics to one run.

W&B's own server cannot be installed in tests. Replies contain the fields that the client's GraphQL
queries name.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "1", "name": "project", "entity": {"id": "2", "name": "somebody"}}


class WandbServer(ThreadingHTTPServer):
    """A server of one run. `history` has its logged values by step."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.history: dict[int, dict[str, Any]] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that disconnected."""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            run = {"id": "3", "name": variables["name"], "config": "{}", "project": PROJECT}
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if "RunResumeStatus" in query:
            return {"model": {**PROJECT, "bucket": self._run(variables["name"])}}
        if "createRunFiles" in query:
            files = [{"name": n, "uploadUrl": f"{self.url}/file"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return {}

    def _run(self, name: str) -> dict[str, Any] | None:
        if not self.history:
            return None
        texts = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}'}
        counts = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(self.history)}
        last = json.dumps(self.history[max(self.history)])
        tails = {"historyTail": json.dumps([last]), "eventsTail": "[]"}
        return {
            "id": "3",
            "name": name,
            "displayName": name,
            "tags": [],
            **texts,
            **counts,
            **tails,
        }


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/graphql"):
            request = json.loads(body)
            self._reply({"data": self.server.answer(request["query"], request.get("variables"))})
            return
        if self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            for line in files.get("wandb-history.jsonl", {}).get("content", []):
                values = json.loads(line)
                self.server.history[values["_step"]] = values
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def wandb_server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
