"""Contract servers for tests: they answer as vLLM and SGLang do, and need none of them
(`contract_server`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from slipstream.inference.servers.process import ServerProcess
from tests.docs.pages import ROOT
from tests.inference.servers import real

PROGRAM = Path(__file__).with_name("contract_server")


def environment(extension: Path) -> dict[str, str]:
    """Environment variables with which `python -m vllm...` starts the contract server."""
    paths = [str(extension), str(PROGRAM), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def python(folder: Path) -> Path:
    """Write a program to `folder` that runs this Python with contract servers in place of vLLM and
    SGLang."""
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROGRAM}:{ROOT}" exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


def launch(folder: Path, **more: Any) -> ServerProcess:
    """Start a contract server for `decoder(0)`, in `folder`. `more` are vLLM's options."""
    return real.launch(
        folder, python=Path(sys.executable), environment=environment(folder / "extension"), **more
    )


def plant(process: ServerProcess, fault: str, value: Any = True) -> None:
    """Plant a fault (`contract_server/vllm/faults.py`)."""
    body = {"fault": fault, "value": value}
    real.CLIENT.post(process.url + "/test/plant", json=body).raise_for_status()
