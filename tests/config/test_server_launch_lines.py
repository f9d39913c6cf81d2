"""Launch lines of VERL train with the engine that they name: against contract servers, and with a
real vLLM (`make test-peers`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.config.engines import SERVED, VLLM_PYTHON
from tests.config.server_launch_lines import IN_CI, WITH_VLLM, train
from tests.config.train_launch_lines import write_files
from tests.inference.servers.local import python
from tests.inference.servers.real import PYTHON


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    write_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), IN_CI.items())
def test_a_line_trains_with_servers(
    name: str, engine: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVED[engine], str(python(tmp_path)))
    print(train(name, root, engine))


@pytest.mark.peers
@pytest.mark.parametrize("name", WITH_VLLM)
def test_a_line_trains_with_vllm(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Path(os.environ.get(VLLM_PYTHON, PYTHON))
    if not found.exists():
        pytest.skip("needs vLLM: make peers")
    monkeypatch.setenv(VLLM_PYTHON, str(found))
    row = train(name, root, "vllm")
    with capsys.disabled():
        print(f"\n{row}")
