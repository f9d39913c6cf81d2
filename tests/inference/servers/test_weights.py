"""The folder from which servers load weights."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import ConfigError, EngineError
from slipstream.inference.servers.vllm_worker import checksum
from slipstream.inference.servers.weights import KEY, MEMORY, WeightFolder
from slipstream.types import WeightUpdate
from tests.docs.pages import ROOT
from tests.inference.helpers import make_decoder, update_from


def test_an_update_is_stored_in_the_dtype_with_its_checksums(tmp_path: Path) -> None:
    decoder = make_decoder(1)
    folder = WeightFolder(make_decoder(0), torch.bfloat16, tmp_path)
    assert folder.path.parent == tmp_path
    stored = folder.write(update_from(decoder, 4))
    assert stored.path == folder.file
    found = load_file(stored.path)
    assert set(found) == {name for name, _ in decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert torch.equal(found[name], parameter.bfloat16())
        assert stored.checksums[name] == checksum(found[name])
    before = folder.file.read_bytes()
    folder.write(update_from(make_decoder(2), 5))
    assert folder.file.read_bytes() != before
    assert [path.name for path in folder.path.iterdir()] == ["model.safetensors"]
    folder.close()
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = WeightFolder(make_decoder(0), torch.float32, tmp_path)
    folder.write(update_from(make_decoder(1), 1))
    before = folder.file.read_bytes()
    tensors = list(make_decoder(2).named_parameters())
    less = [(name, p) for name, p in tensors if name != "model.norm.weight"]
    with pytest.raises(EngineError, match=r"version 2 refused.*model\.norm\.weight is missing"):
        folder.write(WeightUpdate(version=2, buckets=[less]))
    assert folder.file.read_bytes() == before


def test_without_room_the_old_file_stays(tmp_path: Path) -> None:
    folder = WeightFolder(make_decoder(0), torch.float32, tmp_path)
    folder.write(update_from(make_decoder(1), 1))
    before = folder.file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(EngineError, match=f"version 2 refused.*{tmp_path}.*{KEY}"):
            folder.write(update_from(make_decoder(2), 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.file.read_bytes() == before
    assert [path.name for path in folder.path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_cannot_be_made_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{KEY}: .*{tmp_path / 'file'}"):
        WeightFolder(make_decoder(0), torch.float32, tmp_path / "file")


@pytest.mark.skipif(not MEMORY.is_dir(), reason="needs /dev/shm")
def test_memory_is_the_default(tmp_path: Path) -> None:
    folder = WeightFolder(make_decoder(0), torch.float32)
    assert folder.path.parent == MEMORY
    folder.close()
    assert not folder.path.exists()


def test_another_folder_than_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slipstream.inference.servers.weights.MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = WeightFolder(make_decoder(0), torch.float32)
    assert folder.path.parent == tmp_path
    assert str(tmp_path / "missing") in caplog.text
    assert KEY in caplog.text
    caplog.clear()
    WeightFolder(make_decoder(0), torch.float32, tmp_path).close()
    folder.close()
    assert caplog.text == ""


RUN = """
import pathlib, sys, time, torch
from slipstream.inference.servers.transfer import make_transfer
from tests.inference.helpers import make_decoder, update_from
made = make_transfer(sys.argv[2], make_decoder(0), torch.float32, pathlib.Path(sys.argv[1]))
made.guard()
made.prepare(update_from(make_decoder(1), 1))
print(made.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("transport", ["file", "shared_memory"])
def test_the_folder_of_a_run_that_is_killed_is_removed(tmp_path: Path, transport: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), transport],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.stdout is not None
    folder = Path(run.stdout.readline().decode().strip())
    assert list(folder.iterdir())
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_the_guard_of_a_folder_ends_with_it(tmp_path: Path) -> None:
    folder = WeightFolder(make_decoder(0), torch.float32, tmp_path)
    folder.guard()
    process = folder._guard
    folder.guard()
    assert process is not None
    assert folder._guard is process
    folder.close()
    assert process.poll() == 0
    assert list(tmp_path.iterdir()) == []
