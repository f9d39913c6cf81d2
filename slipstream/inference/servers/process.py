"""Starts a server as a process, waits until it is ready, and ends it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from slipstream.errors import EngineError, shortened
from slipstream.inference.servers import guard
from slipstream.reading import reason

POLL_S = 0.2
COMPLAINT = re.compile(r"(?:^|\] |^\S+: )((?:(?:\w+\.)*\w*(?:Error|Exception)|error): .+)$")
"""An error in a log: on a line of its own, or behind the prefix of a log line or a program."""

OF_THE_ENGINE = "See root cause above"
"""Part of the error that vLLM's API server raises when its engine has failed with another one."""

LOG_LINES = 12
"""Lines of the log in the message about a server that did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a server. `command(port)` returns the command line. `what` names the server in
    messages. `folder` is removed if the run is killed."""

    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    log: Path
    timeout_s: float
    what: str
    folder: Path | None = None
    health: str = "/health"
    host: str = field(default="127.0.0.1")


class ServerProcess:
    """A server that this process has started."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._begin = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{self._launch.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, stopped: threading.Event | None = None) -> None:
        """Start the server and return when it answers. Ends an earlier process first.

        Raises EngineError, with the end of its log, if it ends or is not ready in time.
        """
        launch = self._launch
        with self._lock:
            self._end()
            if self._closed:
                raise EngineError(f"{launch.what} is closed")
            self.port = _free_port(launch.host)
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            with launch.log.open("ab") as log:
                self._begin = log.tell()
                try:
                    process = self._process = subprocess.Popen(
                        [
                            sys.executable,
                            guard.__file__,
                            "-" if launch.folder is None else str(launch.folder),
                            *launch.command(self.port),
                        ],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **launch.environment},
                        start_new_session=True,
                    )
                except OSError as error:
                    raise EngineError(
                        f"{launch.what} cannot be started ({reason(error)})"
                    ) from error
        self._wait(process, stopped)

    def close(self) -> None:
        """End the server and all its processes."""
        with self._lock:
            self._closed = True
            self._end()

    def _wait(self, process: subprocess.Popen[bytes], stopped: threading.Event | None) -> None:
        launch, end = self._launch, time.monotonic() + self._launch.timeout_s
        with httpx2.Client(timeout=5.0, trust_env=False, verify=False) as client:
            while time.monotonic() < end:
                if self._process is not process:
                    raise EngineError(f"{launch.what} was ended while it started")
                if process.poll() is not None:
                    self._ended(process)
                    raise EngineError(
                        f"{launch.what} ended while it started{self._complaint()}; "
                        f"{self._log_end()}"
                    )
                try:
                    if client.get(self.url + launch.health).status_code == 200:
                        return
                except httpx2.HTTPError:
                    pass
                if stopped is not None and stopped.wait(POLL_S):
                    break
                time.sleep(POLL_S)
        self._ended(process)
        raise EngineError(
            f"{launch.what} was not ready within {launch.timeout_s:g} s; raise "
            f"actor_rollout_ref.rollout.server.startup_timeout_s, or see why: {self._log_end()}"
        )

    def _lines(self) -> list[str]:
        """The log of this start."""
        with self._launch.log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode("utf-8", "replace").splitlines()

    def _complaint(self) -> str:
        """The last error in the log that is a cause, behind a colon; "" if there is none."""
        lines = self._lines()
        for number in range(len(lines) - 1, -1, -1):
            found = COMPLAINT.search(lines[number])
            if found is not None and OF_THE_ENGINE not in found[1]:
                # pydantic says on the next line what is wrong.
                explained = "validation error" in found[1]
                text = " ".join([found[1], *lines[number + 1 : number + 1 + explained]])
                return f": {shortened(' '.join(text.split()), 500)}"
        return ""

    def _log_end(self) -> str:
        lines = self._lines()
        return f"the end of {self._launch.log}:\n  " + "\n  ".join(lines[-LOG_LINES:])

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        """End a process that is of no use, unless another one has taken its place."""
        with self._lock:
            if self._process is process:
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.write(guard.END)
            process.stdin.close()
        process.wait()


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
