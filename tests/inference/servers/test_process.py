"""Server processes and their guard, with a small server in place of vLLM."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.errors import EngineError
from slipstream.inference.servers.process import Launch, ServerProcess
from tests.docs.pages import ROOT

SERVER = """
import http.server, os, subprocess, sys
# A process of its own group, as vLLM's workers are.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
print("ready", os.environ["SIGN"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

FAILING = "print('first line'); raise SystemExit('no such model')"

SLEEPING = "import time; time.sleep(600)"


def launch(folder: Path, code: str = SERVER, *, timeout_s: float = 60.0) -> Launch:
    removed = folder / "weights"
    removed.mkdir(exist_ok=True)
    return Launch(
        command=lambda port: [sys.executable, "-c", code, str(port)],
        environment={"SIGN": "seven"},
        log=folder / "logs" / "server.log",
        timeout_s=timeout_s,
        what="server 3",
        folder=removed,
    )


def below(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def ended(processes: list[psutil.Process]) -> bool:
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_runs_until_it_is_closed_and_leaves_no_process(tmp_path: Path) -> None:
    server = ServerProcess(launch(tmp_path))
    states = [server.alive]
    server.start()
    states.append(server.alive)
    assert states == [False, True]
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert (tmp_path / "logs" / "server.log").read_text() == "ready seven\n"
    assert server._process is not None
    own = [psutil.Process(server._process.pid), *below(server._process.pid)]
    assert len(own) == 3
    first = server.port
    server.start()
    assert ended(own)
    assert server.port != first
    assert server._process is not None
    again = [psutil.Process(server._process.pid), *below(server._process.pid)]
    server.close()
    assert ended(again)
    assert not server.alive
    assert (tmp_path / "weights").is_dir()
    with pytest.raises(EngineError, match="server 3 is closed"):
        server.start()


def test_a_server_that_ends_at_its_start_shows_its_log(tmp_path: Path) -> None:
    server = ServerProcess(launch(tmp_path, FAILING))
    with pytest.raises(EngineError, match=r"server 3 ended while it started; .*server\.log") as e:
        server.start()
    assert "first line" in str(e.value)
    assert "no such model" in str(e.value)
    server.close()


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    older = below(psutil.Process().pid)  # of earlier tests
    server = ServerProcess(launch(tmp_path, SLEEPING, timeout_s=0.3))
    with pytest.raises(EngineError, match=r"0\.3 s; raise .*server\.startup_timeout_s"):
        server.start()
    assert not server.alive
    assert set(below(psutil.Process().pid)) <= set(older)


def test_closing_ends_a_server_that_starts(tmp_path: Path) -> None:
    older = below(psutil.Process().pid)  # of earlier tests
    server = ServerProcess(launch(tmp_path, SLEEPING))
    failures: list[Exception] = []
    stopped = threading.Event()

    def start() -> None:
        try:
            server.start(stopped)
        except EngineError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: server.alive)
    stopped.set()
    server.close()
    thread.join()
    assert len(failures) == 1
    assert set(below(psutil.Process().pid)) <= set(older)


RUN = """
import sys, time
from pathlib import Path
from tests.inference.servers.test_process import launch
from slipstream.inference.servers.process import ServerProcess
server = ServerProcess(launch(Path(sys.argv[1])))
server.start()
print(server._process.pid, flush=True)
time.sleep(600)
"""


def test_a_run_that_is_killed_leaves_no_process_and_no_weights(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert run.stdout is not None
    guard = psutil.Process(int(run.stdout.readline()))
    servers = below(guard.pid)
    assert len(servers) == 2
    assert (tmp_path / "weights").is_dir()
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    wait_for(lambda: ended([guard, *servers]))
    assert not (tmp_path / "weights").exists()


def test_a_server_that_ends_by_itself_takes_its_processes_along(tmp_path: Path) -> None:
    server = ServerProcess(launch(tmp_path))
    server.start()
    assert server._process is not None
    main, child = below(server._process.pid)
    main.kill()
    wait_for(lambda: not server.alive)
    assert ended([main, child])
    assert server._process.wait() == 128 + signal.SIGKILL
    server.close()


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("usage: x\napi_server.py: error: unrecognized arguments: --a", "unrecognized arguments"),
        (
            "(EngineCore pid=1) ERROR 12-01 [core.py:1510] ValueError: No available memory\n"
            "RuntimeError: Engine core initialization failed. See root cause above. "
            "Failed core proc(s): {}\n  warnings.warn('leaked')",
            "ValueError: No available memory",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
            "  Value error, tokens (16) must be greater\n    For further information visit",
            "SchedulerConfig Value error, tokens (16) must be greater",
        ),
    ],
)
def test_the_cause_of_a_failed_start_comes_first(tmp_path: Path, log: str, complaint: str) -> None:
    def failure(text: str) -> str:
        code = f"import sys; print({text!r}); sys.exit(1)"
        process = ServerProcess(launch(tmp_path, code))
        with pytest.raises(EngineError) as error:
            process.start()
        process.close()
        return str(error.value).partition("; the end of ")[0]

    assert complaint in failure(log)
    # A later start in the same log does not get the errors of the earlier one.
    assert failure("killed") == "server 3 ended while it started"
