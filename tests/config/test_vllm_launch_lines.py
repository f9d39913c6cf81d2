"""Launch lines of VERL train with the engine that they name, against the contract server and
against a real vLLM (`make test-peers`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slipstream.config.engines import VLLM_PYTHON
from tests.config.train_launch_lines import write_files
from tests.config.vllm_launch_lines import IN_CI, WITH_VLLM, train
from tests.docs.pages import ROOT
from tests.inference.servers.local import PROGRAM
from tests.inference.servers.real import PYTHON


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    write_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_a_line_trains_with_servers(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROGRAM}:{ROOT}" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    print(train(name, root))


@pytest.mark.peers
@pytest.mark.parametrize("name", WITH_VLLM)
def test_a_line_trains_with_vllm(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = Path(os.environ.get(VLLM_PYTHON, PYTHON))
    if not python.exists():
        pytest.skip("needs vLLM: make peers")
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    row = train(name, root)
    with capsys.disabled():
        print(f"\n{row}")
