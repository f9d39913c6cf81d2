"""Entry point of the worker process: `python -m slipstream.drafter.worker_process FOLDER`.

A suspended process reads nothing, so it does not notice when its parent ends. Linux resumes the
processes of an orphaned process group, but not if the process that adopts orphans (a login manager,
the first process of a container) is in the same session. So this process asks Linux for a SIGCONT
when its parent ends. It does so before slow imports, because it must not be suspended until then.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

AWARE = "aware"
"""Name of the file that the process creates once it will notice the end of its parent even while
suspended."""

_PR_SET_PDEATHSIG = 1


def wake_at_parents_end() -> None:
    """Have Linux send SIGCONT to this process when the thread that started it ends.

    The worker then finds its input pipe closed, and ends. (A parent that has already ended cannot
    suspend it.)
    """
    if sys.platform == "linux":
        # Other systems resume orphaned process groups (module docstring).
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    wake_at_parents_end()
    folder = Path(sys.argv[1])
    (folder / AWARE).touch()
    from slipstream.drafter.worker import run_worker

    run_worker(folder)
