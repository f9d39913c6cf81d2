"""A peer in a separate process, which answers commands in JSON Lines.

The commands are described in `vllm_peer.py`, `llama_peer.py` and `trl_peer.py` in `bench/peers`.
Used by `contenders` and by `bench/trl_runs.py`.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

from slipstream.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[2]
"""The checkout, which holds the scripts of peers and their virtual environments."""

PEERS_REMEDY = "run `make peers` in a checkout of the repository"
"""Remedy for a missing environment."""

LLAMA_REMEDY = f"{PEERS_REMEDY}, or `make peer-llama` for llama.cpp alone"
"""Remedy for llama.cpp's environment, which is the only small one."""

_TAIL = 2000


def peer_command(
    environment: str, script: str, *, remedy: str, root: Path = ROOT
) -> tuple[str, ...]:
    """The command line that starts `script` in a virtual environment, both relative to `root`.

    Raises ConfigError with `remedy` if one of them is missing.
    """
    # The file `.installed` shows that the installation was completed.
    for path in (root / environment / ".installed", root / script):
        if not path.exists():
            raise ConfigError(f"{path} does not exist; {remedy}")
    return str(root / environment / "bin" / "python"), str(root / script)


class PeerProcess:
    """A process that runs `command` and answers `ask`. Leaving the context ends it."""

    def __init__(self, name: str, command: Sequence[str], *, timeout: float = 900.0) -> None:
        """`timeout` is the longest time to an answer, in seconds. `name` is used in errors."""
        self._name = name
        self._timeout = timeout
        self._log = TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, op: str, **arguments: object) -> Mapping[str, Any]:
        """Send a command and return its answer.

        Raises EngineError, with the end of the process's log, if the process refuses the command,
        ends, exceeds the timeout, or answers anything but an object with the key `ok`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(op, "its process has ended") from None
        line = self._read_line(op)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or "ok" not in answer:
            raise self._failed(op, f"it answered {line[:200].decode(errors='replace')!r}")
        if not answer["ok"]:
            raise self._failed(op, str(answer.get("error")))
        return answer

    def close(self) -> None:
        """Ask the process to quit; kill it if it does not."""
        process = self._process
        if process.poll() is None:
            try:
                process.communicate(b'{"op": "quit"}\n', timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                # The pipe can still hold a command that a dead process did not read.
                with suppress(BrokenPipeError):
                    stream.close()

    def _read_line(self, op: str) -> bytes:
        stream = self._process.stdout
        assert stream is not None
        end = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self._failed(op, f"no answer within {self._timeout:g} s")
                piece = stream.read1(1 << 20)  # type: ignore[attr-defined]
                if not piece:
                    raise self._failed(op, "its process has ended")
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _failed(self, op: str, what: str) -> EngineError:
        self._log.seek(0)
        tail = self._log.read()[-_TAIL:].decode(errors="replace").strip()
        logged = f"; the end of its log:\n{tail}" if tail else ""
        return EngineError(f"peer {self._name}, {op}: {what}{logged}")
