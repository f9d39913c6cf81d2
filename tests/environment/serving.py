"""Servers for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.docs.pages import ROOT


@contextlib.contextmanager
def serving(module: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `python -m MODULE PORT`. Returns the URL and the process, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", module, str(port)], cwd=ROOT)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
