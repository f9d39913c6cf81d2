"""Detection of CPU features, and kernels without AMX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from slipstream.kernels import processor

ROOT = Path(__file__).parents[2]


def amx_with(monkeypatch: pytest.MonkeyPatch, **features: bool) -> bool:
    """Return `has_amx` for a CPU with these features."""
    names = {name.replace("_", "-"): there for name, there in features.items()}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: names)
    return processor.has_amx.__wrapped__()


def test_amx_is_used_if_the_cpu_has_it_and_it_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    all_features = {"amx_tile": True, "amx_bf16": True, "avx512bf16": True}
    for missing in all_features:
        assert not amx_with(monkeypatch, **(all_features | {missing: False}))
    monkeypatch.setenv(processor.NO_AMX, "1")
    assert not amx_with(monkeypatch, **all_features)
    monkeypatch.setenv(processor.NO_AMX, "0")
    # The system permits AMX if the CPU really has it.
    assert amx_with(monkeypatch, **all_features) is ("amx_bf16" in processor.cpu_flags())


@pytest.mark.skipif(not processor.has_amx(), reason="without AMX, all tests use these kernels")
def test_kernels_work_without_amx() -> None:
    files = [
        *("tests/kernels/test_attend_bf16.py", "tests/kernels/test_team.py"),
        *("tests/models/test_linear.py", "tests/inference/speculation/test_eagle.py"),
        *("-k", "not test_eagle or threads_draft"),
    ]
    # AMX instructions must not be compiled either, because other CPUs do not know them.
    known = binding.get_host_cpu_features()
    features = ",".join(
        f"{'+' if there and not name.startswith('amx') else '-'}{name}"
        for name, there in known.items()
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ
        | {processor.NO_AMX: "1", "NUMBA_CPU_FEATURES": features}
        | {"NUMBA_CPU_NAME": binding.get_host_cpu_name()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
