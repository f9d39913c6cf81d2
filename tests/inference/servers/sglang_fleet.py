"""Contract servers of SGLang."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.sglang import (
    RESERVED,
    SGLangServer,
    sglang_command,
    sglang_environment,
)
from tests.docs.pages import ROOT
from tests.inference.servers.fleet import Fleet
from tests.inference.servers.local import PROGRAM
from tests.inference.servers.real import CLIENT

LENGTH = 96
SETTINGS: dict[str, Any] = {
    "context_length": LENGTH + RESERVED,
    "dtype": "float32",
    "enable_deterministic_inference": True,
}
"""The contract suite compares responses of the same seed."""


def variables() -> dict[str, str]:
    """Environment variables with which `python -m sglang...` starts the contract server."""
    paths = os.pathsep.join([str(PROGRAM), str(ROOT)])
    return {**sglang_environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


class SGLangFleet(Fleet):
    """Contract servers of SGLang that load their weights from one folder."""

    name = "sglang"
    client = SGLangServer
    settings = SETTINGS

    def program(self, folder: Path) -> tuple[Callable[[int], list[str]], dict[str, str]]:
        python = Path(sys.executable)
        command = partial(sglang_command, python, self.weights.path, self.settings)
        return command, variables()

    def load(self, process: ServerProcess, path: Path) -> None:
        post(process, "/update_weights_from_disk", {"model_path": str(path.parent)})


def post(process: ServerProcess, route: str, body: Any = None) -> httpx2.Response:
    """Post to a server, and return its answer."""
    return CLIENT.post(process.url + route, json=body)
