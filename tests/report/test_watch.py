"""The report of a run in progress, served over real HTTP."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError, DataError
from slipstream.report.watch import HOST, PORT, Source, make_server
from tests.docs.pages import ROOT
from tests.report.conftest import Show
from tests.report.run_folders import STEP, line, make_run


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve `folder` during the body and yield the port; then wait until all threads end."""
    with make_server(Source([folder]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str, host: str = HOST) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(HOST, port, timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", f"{host}:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, gzip.decompress(body) if answer.getheader("Content-Encoding") else body


def data(port: int, have: str = "") -> tuple[int, str | None, dict[str, Any]]:
    answer, body = get(port, f"/data.json?have={have}")
    return answer.status, answer.getheader("ETag"), json.loads(body or b"{}")


def test_data_are_sent_only_if_they_changed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with served(folder) as port:
        answer, body = get(port, "/")
        assert (answer.status, b"const LIVE = true" in body) == (200, True)
        status, tag, first = data(port)
        assert (status, first["runs"][0]["tiles"][0][1]) == (200, "4 of 4")
        assert tag is not None
        assert data(port, tag) == (304, None, {})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line(5, 130.0, STEP))
            file.write('{"step": 6, "dat')
        status, after, second = data(port, tag)
        assert (status, second["runs"][0]["tiles"][0][1]) == (200, "5 of 4")
        assert after not in (None, tag)


def test_data_are_kept_while_the_run_folder_is_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with served(folder) as port:
        _, tag, _ = data(port)
        folder.rename(tmp_path / "away")
        assert data(port, tag or "")[0] == 304
        assert get(port, "/")[0].status == 200


def test_other_hosts_and_paths_are_refused(tmp_path: Path) -> None:
    with served(make_run(tmp_path)) as port:
        # DNS rebinding: another site's name may resolve to this server.
        assert get(port, "/data.json", host="evil.example")[0].status == 403
        assert get(port, "/data.json", host="localhost")[0].status == 200
        assert get(port, "/../config.yaml")[0].status == 404
        assert get(port, "/config.yaml")[0].status == 404


def test_a_used_port_is_refused_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path)
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is .*--port N"):
            make_server(Source([folder]), port)
        assert main(["watch", str(folder), "--port", str(port)]) == ConfigError.exit_code
        assert f"port {port} is not available" in capsys.readouterr().err
    with make_server(Source([folder])) as first, make_server(Source([folder])) as second:
        ports = [server.server_address[1] for server in (first, second)]
    assert PORT <= ports[0] < ports[1]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert main(["watch", str(tmp_path)]) == DataError.exit_code


def test_an_open_page_follows_the_run(show: Show, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with served(folder) as port, show(f"http://{HOST}:{port}/") as shown:
        page = shown.page
        page.locator("#chart-lengths .legend button").first.click()
        page.evaluate("plots.get('lengths').u.setScale('x', { min: 2, max: 3 })")
        page.locator("details summary", has_text="Configuration").click()
        assert "4 of 4" in page.inner_text("#top")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line(5, 130.0, STEP))
        page.wait_for_function("document.getElementById('top').innerText.includes('5 of 4')")
        # A hidden line stays hidden.
        assert page.locator("#chart-lengths .legend button.off").count() == 1
        # The zoom of this chart and opened details are kept; other charts are not zoomed.
        shown_x = "(id) => { const x = plots.get(id).u.scales.x; return [x.min, x.max]; }"
        assert page.evaluate(shown_x, "lengths") == [2, 3]
        assert page.evaluate(shown_x, "reward") == [1, 5]
        assert page.locator("details[open] summary", has_text="Configuration").count() == 1
        assert shown.messages == []
        assert {url.split("?")[0] for url in shown.requests} == {
            f"http://{HOST}:{port}/",
            f"http://{HOST}:{port}/data.json",
        }


def test_the_end_of_a_run_is_noticed_without_a_file_change(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(events[:4]))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with served(folder) as port:
        _, tag, running = data(port)
        os.close(lock)
        status, _, after = data(port, tag or "")
    assert (running["runs"][0]["state"], status, after["runs"][0]["state"]) == (
        "running", 200, "killed",
    )  # fmt: skip


def test_a_read_error_is_logged_and_the_server_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path)
    with served(folder) as port:
        _, tag, _ = data(port)

        def fail(folders: object) -> None:
            raise PermissionError("not for you")

        monkeypatch.setattr("slipstream.report.watch.read_runs", fail)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line(5, 130.0, STEP))
        assert data(port, tag or "") == (304, None, {})
    assert "PermissionError: not for you" in caplog.text


def test_a_port_can_be_reused_immediately(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with served(folder) as port:
        assert data(port)[0] == 200
    with make_server(Source([folder]), port) as server:
        assert server.server_address[1] == port


def test_the_address_is_printed_immediately_through_a_pipe(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "watch", make_run(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(60, process.kill)
        late.start()
        lines = [process.stdout.readline(), process.stdout.readline()]
        late.cancel()
        process.terminate()
    assert lines[0] == f"watching {tmp_path}\n"
    assert lines[1].startswith(f"open http://{HOST}:")
