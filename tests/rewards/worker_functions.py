"""Functions that the tests of `workers` call in worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from slipstream.errors import RewardError


def work(begin: Callable[[], None], kind: str, *values: Any) -> Any:
    """Do what `kind` says, before or after `begin`."""
    when, _, what = kind.partition(" ")
    if when == "after":
        begin()
    return _KINDS[what](*values)


def _raise(error: BaseException) -> Any:
    raise error


_KINDS: dict[str, Callable[..., Any]] = {
    "sum": lambda *values: sum(values),
    "pid": os.getpid,
    "loop": lambda: _loop(),
    "power": lambda: 9**999999999,
    "memory": lambda: len(bytearray(1 << 40)),
    "sleep": lambda: time.sleep(1000),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "print": lambda: print('{"result": 1}'),
    "long": lambda: "x" * (65 << 20),
    "text": lambda text: text,
    "value": lambda: _raise(ValueError("not this")),
    "system exit": lambda: _raise(SystemExit(0)),
    "recursion": lambda: _nested(10**6),
    "reward": lambda: _raise(RewardError("install it")),
}


def _loop() -> None:
    while True:
        pass


def _nested(depth: int) -> int:
    return 0 if not depth else 1 + _nested(depth - 1)


def missing() -> None:
    """A preparation that fails."""
    raise RewardError("pip install something")
