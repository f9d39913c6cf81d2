"""What a `DraftWorker` starts: `python -m slipstream.drafter.worker_process FOLDER`.

A process that is stopped reads nothing, so that its parent's end does not end it. Linux wakes
those whose process group nobody can reach any more, but not where whoever adopts orphans (a login
manager, the first process of a container) shares their session. So this one asks to be woken,
before anything that takes time is imported: until then it must not be stopped.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

AWARE = "aware"
"""A file of the folder that is there once the process learns of its parent's end even while it is
stopped."""

_PR_SET_PDEATHSIG = 1


def wake_at_parents_end() -> None:
    """Have Linux send SIGCONT when the thread that started this process ends. A worker finds then
    that nobody writes to it any more, as it does where it is not stopped. (A parent that has ended
    already cannot stop it.)"""
    if sys.platform == "linux":
        # Without it a worker is ended by what there is elsewhere: see above.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    wake_at_parents_end()
    folder = Path(sys.argv[1])
    (folder / AWARE).touch()
    from slipstream.drafter.worker import run_worker

    run_worker(folder)
