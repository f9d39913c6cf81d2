"""A generator in a process of its own, spoken to in JSON lines.

Knows the protocol (`bench/peers/vllm_peer.py` has its commands), not who answers. Used by
`contenders`.
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
"""The checkout: scripts of peers and their environments are no part of the package."""

PEERS_REMEDY = "run `make peers` in a checkout of the repository"
"""Where an environment is missing."""

_TAIL = 2000


def peer_command(
    environment: str, script: str, *, remedy: str, root: Path = ROOT
) -> tuple[str, ...]:
    """The command line that starts `script` in a virtual environment, both relative to `root`.

    Raises ConfigError with `remedy` where one of them is missing.
    """
    # The stamp: an environment whose installation was cut short is not there.
    for path in (root / environment / ".installed", root / script):
        if not path.exists():
            raise ConfigError(f"{path} does not exist; {remedy}")
    return str(root / environment / "bin" / "python"), str(root / script)


class PeerProcess:
    """Starts `command`; `ask` it as often as wanted; leaving the context ends it."""

    def __init__(self, name: str, command: Sequence[str], *, timeout: float = 900.0) -> None:
        """`timeout` bounds the seconds to one answer. `name` stands in errors."""
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
        """The answer to one command.

        Raises EngineError, with the end of what the process logged, when it refuses, ends, takes
        longer than the timeout or answers something else than an object.
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
        """End the process: asked first, killed when it does not."""
        process = self._process
        if process.poll() is None:
            try:
                process.communicate(b'{"op": "quit"}\n', timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                # A command may be left that a dead process did not read.
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
