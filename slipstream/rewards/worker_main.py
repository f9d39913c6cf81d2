"""The main program of a scoring process (see `workers`).

A call is the pickled list `[cpu_limit_s, *arguments]`, after its length in 8 bytes. The reply is a
line of JSON: `{"result": ...}`, or `{"error": type, "text": message, "began": ...}`. When the
function begins to compute with the response, the line `{"begins": true}` is written before the
reply. The first line says that the process is ready, and why it is not locked down.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from slipstream.errors import RewardError
from slipstream.rewards.lock_down import lock_down

_MB = 1 << 20
_SHOWN = 500
"""Characters of an error message that are sent."""


def main(settings: Mapping[str, Any]) -> None:
    """Serve calls until standard input ends. `settings`: see `workers._Worker`."""
    # Libraries may print. Standard output is only for replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The kernel ends the process when the timer expires. A handler in Python would have to wait for
    # the end of a long operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit = settings["memory_mb"] * _MB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = _named(settings["function"])
        if settings["prepare"] is not None:
            _named(settings["prepare"])()
    except RewardError as error:
        _write(replies, {"error": "RewardError", "text": str(error)})
        return
    # This protects the system if a response gets past the scorers' own rules.
    _write(replies, {"begins": False, "unlocked": lock_down()})
    calls = sys.stdin.buffer
    while size := calls.read(8):
        cpu_limit_s, *arguments = pickle.loads(calls.read(int.from_bytes(size, "little")))
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        reply = _reply(function, arguments, replies)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(replies, reply)


def _named(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _reply(function: Callable[..., Any], arguments: list[Any], replies: TextIO) -> dict[str, Any]:
    began = False

    def begin() -> None:
        nonlocal began
        began = True
        _write(replies, {"begins": True})

    try:
        return {"result": function(begin, *arguments)}
    except RewardError as error:
        return {"error": "RewardError", "text": str(error)}
    except BaseException as error:  # a library may raise anything on an odd answer
        return {"error": type(error).__name__, "text": _text(error), "began": began}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_SHOWN]
    except Exception:  # for example an integer with too many digits to print
        return ""


def _write(replies: TextIO, reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
