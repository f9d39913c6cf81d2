"""What the kernels may use of a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from slipstream.kernels import processor

ROOT = Path(__file__).parents[2]


def matrix_unit(monkeypatch: pytest.MonkeyPatch, **features: bool) -> bool:
    names = {name.replace("_", "-"): there for name, there in features.items()}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: names)
    return processor.has_matrix_unit.__wrapped__()


def test_the_matrix_unit_is_used_where_it_is_and_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"amx_tile": True, "amx_bf16": True, "avx512bf16": True}
    for missing in there:
        assert not matrix_unit(monkeypatch, **(there | {missing: False}))
    monkeypatch.setenv(processor.NO_AMX, "1")
    assert not matrix_unit(monkeypatch, **there)
    monkeypatch.setenv(processor.NO_AMX, "0")
    # Whether the system gives it; here it does, or there is none.
    assert matrix_unit(monkeypatch, **there) is ("amx_bf16" in processor.words())


@pytest.mark.skipif(not processor.has_matrix_unit(), reason="no matrix unit: these are the kernels")
def test_kernels_without_the_matrix_unit() -> None:
    files = [
        *("tests/kernels/test_attend_bf16.py", "tests/kernels/test_team.py"),
        *("tests/models/test_linear.py", "tests/inference/speculation/test_eagle.py"),
        *("-k", "not test_eagle or threads_draft"),
    ]
    # Nor may its instructions be compiled: a processor that has no such unit knows none of them.
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
