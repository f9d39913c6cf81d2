"""Runs a program, and ends it with all its children when the process that started this one ends.

    python guard.py FOLDER [PROGRAM [ARGUMENT ...]]

The run holds the other end of standard input. To end the program, it writes a byte and closes it.
If the run ends in any way, also by SIGKILL, standard input ends without that byte. FOLDER is
removed then ("-": none). The exit status is the program's. Without a program, the folder is removed
when standard input ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

_PR_SET_CHILD_SUBREAPER = 36
END = b"."
"""What the run writes to end the program."""

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def end_children() -> None:
    """End all processes below this one."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        _quietly(child.terminate)
    _, alive = psutil.wait_procs(children, timeout=GRACE_S)
    for child in alive:
        _quietly(child.kill)
    # A child may have started another one in the meantime.
    for child in psutil.Process().children(recursive=True):
        _quietly(child.kill)


def _quietly(action: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.Error):
        action()


def main() -> int:
    folder, command = sys.argv[1], sys.argv[2:]
    run = os.getppid()
    if not command:
        while os.read(0, 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    # Orphans of the program become children of this process, so that they are found.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    asked, closed = threading.Event(), threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            asked.set()
        closed.set()
        end_children()

    threading.Thread(target=watch, daemon=True).start()
    while (status := program.poll()) is None:
        if os.getppid() != run:
            end_children()
        time.sleep(0.1)
    end_children()
    killed = os.getppid() != run or (closed.is_set() and not asked.is_set())
    if folder != "-" and killed:
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
