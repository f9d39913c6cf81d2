"""Tests of counting GPUs without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import detect_hardware


@pytest.mark.parametrize(
    ("setting", "gpus"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,-1,1", 1),
        ("0,7", 1),
        ("GPU-12ab,GPU-34cd", 2),
        ("0,1,2,0", 3),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, gpus: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = detect_hardware(tmp_path)
    assert found.gpus == gpus


def test_without_device_files_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert detect_hardware(tmp_path).gpus == 0
