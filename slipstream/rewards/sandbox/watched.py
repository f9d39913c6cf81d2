"""Runs a command, and stops it at its limits of time, memory and output.

Knows processes, not isolation. Used by the sandboxes of this machine.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.rewards.sandbox.protocol import Verdict

_POLL_S = 0.05
_CHUNK = 1 << 16
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process. `status` is `Popen.returncode`. Verdict "ok": no limit was reached."""

    verdict: Verdict
    status: int
    stdout: bytes
    stderr: bytes
    seconds: float


def run_watched(
    command: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
    memory_mb: int,
    output_bytes: int,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    fds: Sequence[int] = (),
) -> Ended:
    """Run a command in its own session until it ends or reaches a limit.

    Afterwards all processes of the session are killed. `fds` stay open in the command. Raises
    OSError if it cannot be started.
    """
    began = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        file.write(stdin)
        file.flush()
        # Open the file read-only, since the command could otherwise write to this machine's disk.
        source = Path(file.name).open("rb")  # noqa: SIM115 - closed below
    with source:
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=cwd,
            pass_fds=tuple(fds),
            start_new_session=True,
        )
    try:
        verdict, written = _watch(process, began + timeout_s, memory_mb * _MB, output_bytes)
    finally:
        # Kill the whole session, because child processes may still be running.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    return Ended(verdict, process.returncode, *written, time.monotonic() - began)


def _watch(
    process: subprocess.Popen[bytes], deadline: float, memory: int, output: int
) -> tuple[Verdict, tuple[bytes, bytes]]:
    written = (bytearray(), bytearray())
    looked = time.monotonic()

    def ended(verdict: Verdict) -> tuple[Verdict, tuple[bytes, bytes]]:
        return verdict, (bytes(written[0]), bytes(written[1]))

    with selectors.DefaultSelector() as streams:
        for stream, buffer in zip((process.stdout, process.stderr), written, strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            streams.register(stream, selectors.EVENT_READ, buffer)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return ended("time")
            over = process.poll() is not None
            wait = 0.0 if over else min(_POLL_S, deadline - now)
            ready = streams.select(wait) if streams.get_map() else []
            for key, _ in ready:
                if chunk := os.read(key.fd, _CHUNK):
                    key.data.extend(chunk)
                else:
                    streams.unregister(key.fileobj)
            if sum(map(len, written)) > output:
                return ended("output")
            if over and not ready:
                return ended("ok")
            if not streams.get_map() and not over:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
            if now - looked >= _POLL_S:
                looked = now
                if _memory(process.pid) > memory:
                    return ended("memory")


def _memory(pid: int) -> int:
    """Return the memory in bytes of a process and its descendants, shared pages counted once."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        # RSS is quick to read but an upper bound: it counts shared pages once per process.
        bound = sum(_of(member, "rss") for member in family)
        return bound if len(family) == 1 else min(bound, sum(_share(m) for m in family))
    return 0


def _share(process: psutil.Process) -> int:
    """Return the proportional set size, or RSS if this process may not read it."""
    return _of(process, "pss") or _of(process, "rss")


def _of(process: psutil.Process, kind: str) -> int:
    with suppress(psutil.Error):
        info = process.memory_info() if kind == "rss" else process.memory_full_info()
        return int(getattr(info, kind))
    return 0
