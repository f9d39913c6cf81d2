"""Calls scorers in worker processes, which are killed at a deadline.

A scorer that computes with a response's answer may never end: `9^{99999999}` keeps the interpreter
busy, and Python cannot stop a thread. A `WorkerPool` calls such a scorer in another process. The
kernel ends the process after a number of CPU seconds; a busy machine does not shorten the
deadline. Worker processes stay alive between calls, so that they import their libraries once.

Calls are pickled. Replies are JSON, because a response could make a worker send anything.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from slipstream.errors import RewardError
from slipstream.threads import usable_cores

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S: ContextVar[float | None] = ContextVar("CALL_TIMEOUT_S", default=None)
"""Deadline in seconds of the reward call that runs in this context; None if it has none."""

CPU_LIMIT_S = 2.0
"""CPU seconds for one answer. Ordinary answers need two milliseconds."""

_SHARE = 0.5
"""Share of the call's deadline that a worker may use. An answer that takes too long is then wrong,
before the call fails at its own deadline."""

_WALL = 6.0
"""Wall-clock seconds per CPU second of the limit, for a worker on a busy machine."""

_START_S = 120.0
"""Wall-clock seconds in which a worker must start and import its libraries."""

MEMORY_MB = 4096
"""Address space of one worker."""

_MAX_REPLY = 64 << 20
_MAX_WORKERS = 8
_CHUNK = 1 << 16


class TooMuchWorkError(Exception):
    """The scorer reached its limit of time or memory, or its process ended, while it computed with
    the response."""


class _EndedError(Exception):
    """The worker did not answer. `began`: it had begun to compute with the response."""

    def __init__(self, reason: str, began: bool) -> None:
        super().__init__(reason)
        self.began = began


class WorkerPool:
    """Worker processes for one function, given as `module:name`.

    A new process first calls `prepare`, also `module:name`, which loads libraries. The function is
    called as `function(begin, *arguments)`. It calls `begin()` when it has read the
    ground truth and begins to compute with the response. Its result is a JSON value. `size` is the
    maximum number of processes, by default one per core.
    """

    def __init__(
        self,
        function: str,
        *,
        prepare: str | None = None,
        size: int | None = None,
        cpu_limit_s: float = CPU_LIMIT_S,
    ) -> None:
        self._settings = {"function": function, "prepare": prepare, "memory_mb": MEMORY_MB}
        self._cpu_limit_s = cpu_limit_s
        self.size = size or min(usable_cores(), _MAX_WORKERS)
        self._lock = threading.Lock()
        self._free: threading.Semaphore | None = None
        self._idle: list[_Worker] = []
        self._owner = 0
        self.killed = 0
        """Number of calls that ended their worker."""

    def call(self, *arguments: Any) -> Any:
        """Return the function's result.

        Raises TooMuchWorkError if the response takes too much time or memory, ValueError with the
        function's message if the function raises a ValueError or does not get past the ground
        truth, and RewardError if it raises one or if workers cannot start.
        """
        limit = self._cpu_limit_s
        if (timeout := CALL_TIMEOUT_S.get()) is not None:
            limit = min(limit, _SHARE * timeout)
        with self._slots():
            worker = self._take()
            try:
                reply = worker.ask(limit, arguments)
            except _EndedError as ended:
                worker.kill()
                self.killed += 1
                if ended.began:
                    raise TooMuchWorkError(str(ended)) from None
                raise ValueError(f"the ground truth could not be computed: {ended}") from None
            except BaseException:
                worker.kill()
                raise
            with self._lock:
                self._idle.append(worker)
        return _result(reply)

    def close(self) -> None:
        """End all idle workers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _slots(self) -> threading.Semaphore:
        with self._lock:
            if self._owner != os.getpid():
                # After a fork the workers belong to the parent process.
                self._owner, self._idle, self._free = os.getpid(), [], None
                atexit.register(self.close)
            if self._free is None:
                self._free = threading.Semaphore(self.size)
            return self._free

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return _Worker(self._settings)
            if worker.alive:
                return worker
            worker.kill()


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        settings = {"path": sys.path, **settings}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in the terminal is for the run, which then finishes its step.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._ready = {end: select.poll() for end in (self._to, self._from)}
        for end, event in ((self._to, select.POLLOUT), (self._from, select.POLLIN)):
            os.set_blocking(end, False)
            self._ready[end].register(end, event)
        self._read = bytearray()
        try:
            started = self._line(time.monotonic() + _START_S)
        except _EndedError as ended:
            self.kill()
            raise RewardError(
                f"the scoring process of {settings['function']} did not start: {ended}; "
                "its own message is above"
            ) from None
        if "error" in started:
            self.kill()
            _result(started)
        if (reason := started.get("unlocked")) is not None:
            _warn_unlocked(reason)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, cpu_limit_s: float, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the reply to one call. Raises _EndedError if there is none."""
        deadline = time.monotonic() + _WALL * cpu_limit_s
        request = pickle.dumps([cpu_limit_s, *arguments])
        self._write(len(request).to_bytes(8, "little") + request, deadline)
        began = False
        while True:
            try:
                reply = self._line(deadline)
            except _EndedError as ended:
                raise _EndedError(str(ended), began) from None
            if "begins" not in reply:
                return reply
            began = True

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._to, deadline)
            try:
                rest = rest[os.write(self._to, rest[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise _EndedError("the process ended", began=False) from None

    def _line(self, deadline: float) -> dict[str, Any]:
        while (end := self._read.find(b"\n")) < 0:
            self._wait(self._from, deadline)
            chunk = os.read(self._from, _CHUNK)
            if not chunk:
                status = self._process.wait()
                raise _EndedError(f"the process ended with status {status}", began=False)
            self._read += chunk
            if len(self._read) > _MAX_REPLY:
                raise _EndedError("the reply is too long", began=False)
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        value: dict[str, Any] = json.loads(line)
        return value

    def _wait(self, end: int, deadline: float) -> None:
        left_ms = max(1000.0 * (deadline - time.monotonic()), 0.0)
        if not self._ready[end].poll(left_ms):
            raise _EndedError("no answer within the deadline", began=False)


@cache
def _warn_unlocked(reason: str) -> None:
    """Log once that workers are not locked down (see `lock_down`)."""
    _log.warning(
        "scoring workers can start programs, write files and use the network, because they cannot "
        "be locked down here: %s; locking down needs Linux on x86_64 or aarch64",
        reason,
    )


_MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings['path']; "
    "from slipstream.rewards.worker_main import main; main(settings)"
)


def _result(reply: dict[str, Any]) -> Any:
    kind, text = reply.get("error"), str(reply.get("text"))
    if kind is None:
        return reply["result"]
    if kind == "RewardError":
        raise RewardError(text)
    if reply.get("began"):
        raise TooMuchWorkError(f"{kind}: {text}")
    raise ValueError(text if kind == "ValueError" else f"{kind}: {text}")
