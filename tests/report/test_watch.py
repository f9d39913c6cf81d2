"""The report of a run in progress, served over real HTTP."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError, DataError
from slipstream.report import watch
from slipstream.report.watch import HOST, MAX_CONNECTIONS, PORT, Source, make_server
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
        # Not `wait_for_function`: the page's Content-Security-Policy does not allow its `eval`.
        page.locator("#top", has_text="5 of 4").wait_for()
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


def test_only_scripts_of_the_page_itself_run(show: Show, tmp_path: Path) -> None:
    with served(make_run(tmp_path)) as port:
        policy = get(port, "/")[0].getheader("Content-Security-Policy") or ""
        assert {part.split()[0] for part in policy.split("; ")} >= {
            "default-src", "script-src", "style-src", "connect-src", "frame-ancestors",
        }  # fmt: skip
        assert "unsafe" not in policy
        assert "http" not in policy
        for path in ("/data.json", "/nothing"):
            answer = get(port, path)[0]
            assert answer.getheader("Content-Security-Policy") == policy
            assert answer.getheader("X-Content-Type-Options") == "nosniff"
        with show(f"http://{HOST}:{port}/") as shown:
            assert shown.messages == []  # no style and no script of the page was refused
            shown.page.evaluate(
                "document.body.append(Object.assign(document.createElement('script'),"
                " { textContent: 'window.injected = 1' }))"
            )
            assert shown.page.evaluate("window.injected") is None
            assert "Content Security Policy" in shown.messages[0]


def closed(client: socket.socket) -> bool:
    """Return whether the server closes the connection; reads what it sends before."""
    client.settimeout(30)
    try:
        while client.recv(65_536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def connected(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection((HOST, port), timeout=30)
    client.sendall(sent)
    return client


HALF = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"G", HALF])
def test_a_client_without_a_complete_request_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(watch, "REQUEST_S", 0.2)
    with served(make_run(tmp_path)) as port, connected(port, sent) as client:
        assert closed(client)


def test_a_client_that_sends_a_byte_at_a_time_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REQUEST_S", 0.5)
    over = threading.Event()
    with served(make_run(tmp_path)) as port, connected(port, HALF) as client:

        def trickle() -> None:
            # Each byte arrives in time for a deadline that counts from the last byte.
            with suppress(OSError):
                while not over.wait(0.05):
                    client.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        assert closed(client)
        over.set()
        thread.join()


def test_a_client_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "REPLY_S", 0.3)
    source = Source([make_run(tmp_path)])
    source.body = os.urandom(50_000_000)  # more than the buffers of a connection hold
    with make_server(source, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        before = threading.active_count()
        address = server.server_address[1]
        with connected(address, HALF.replace(b"/ ", b"/data.json ") + b"\r\n") as client:
            assert client.recv(1)  # the reply has begun
            while threading.active_count() > before:
                time.sleep(0.001)  # the thread of this connection ends, although nothing was read
        server.shutdown()
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_the_number_of_connections_is_bounded(tmp_path: Path) -> None:
    before = threading.active_count()
    with served(make_run(tmp_path)) as port, ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(3 * MAX_CONNECTIONS)]
        # The oldest ones make room, so that a browser still gets the page.
        assert get(port, "/")[0].status == 200
        assert all(closed(client) for client in clients[: 2 * MAX_CONNECTIONS])
        assert threading.active_count() - before <= MAX_CONNECTIONS + 2


def test_clients_that_disconnect_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reset = struct.pack("ii", 1, 0)  # closing sends RST instead of FIN
    with served(make_run(tmp_path)) as port:
        for sent in (b"", HALF, HALF + b"\r\n", b"GET /data.json HTTP/1.0\r\n\r\n"):
            with connected(port, sent) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        for path in ("http://[/", "/" + "x" * 70_000):
            assert get(port, path)[0].status in (400, 414)
        assert get(port, "/")[0].status == 200
    assert capfd.readouterr() == ("", "")


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
