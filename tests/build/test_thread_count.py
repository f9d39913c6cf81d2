"""The number of threads that a run computes with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.build import thread_count as build_thread_count
from slipstream.build.thread_count import candidates, choose, threads_for
from slipstream.cli import main
from slipstream.run import train as run_train
from slipstream.threads import usable_cores
from tests.inference.helpers import shared_decoder
from tests.run.helpers import tiny


def test_usable_cores_respect_the_cgroup_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(tmp_path / "none") == 16
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert usable_cores(tmp_path) == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("6400000 100000\n")
    assert usable_cores(tmp_path) == 16
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 16
    old = tmp_path / "version1/cpu"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("400000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(old.parent) == 4
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(old.parent) == 16


def test_choose_takes_the_largest_thread_count_close_to_the_fastest() -> None:
    assert candidates(1) == [1]
    assert candidates(6) == [1, 2, 4, 6]
    assert candidates(16) == [1, 2, 4, 8, 16]
    assert choose({1: 3.0, 2: 2.0, 4: 1.0, 8: 1.09, 16: 1.2}) == 8
    assert choose({1: 1.0, 2: 1.5}) == 1


def test_measured_thread_count_is_kept_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    asked: list[int] = []

    def seconds(engine: object) -> float:
        asked.append(torch.get_num_threads())
        return 0.004 / min(asked[-1], 2) + 0.001 * asked[-1]

    monkeypatch.setattr(build_thread_count, "_step_seconds", seconds)
    before = torch.get_num_threads()

    def chosen(cores: int) -> int:
        policy = shared_decoder().config
        return threads_for(tmp_path, policy, dtype=torch.float32, cores=cores, notify=said.append)

    assert chosen(6) == 2
    assert asked == [1, 2, 4, 6]
    assert torch.get_num_threads() == before
    assert said == [
        "2 threads on 6 cores: a decode step of 32 requests in one layer takes (threads: ms) "
        "1: 5.00, 2: 4.00, 4: 6.00, 6: 8.00; trainer.num_threads=2 sets it for other runs, too"
    ]
    assert json.loads((tmp_path / "threads.json").read_text())["num_threads"] == 2
    assert chosen(6) == 2
    assert len(asked) == 4
    # On a machine with another number of cores, it is measured again.
    assert chosen(1) == 1
    assert asked[4:] == [1]


def test_thread_count_is_measured_with_real_decode_steps(tmp_path: Path) -> None:
    said: list[str] = []
    policy = shared_decoder().config
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        found = threads_for(folder, policy, dtype=dtype, cores=2, notify=said.append)
        times = json.loads((folder / "threads.json").read_text())["ms_per_step"]
        assert found in (1, 2)
        assert all(0 < took < 1000 for took in times.values())
    assert len(said) == 2


def test_run_measures_thread_counts_unless_num_threads_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_train, "FEW", 0)
    less = ("sft.total_training_steps=1", "trainer.total_training_steps=0")
    assert main(tiny(tmp_path / "told", *less)) == 0
    assert not (tmp_path / "told/threads.json").exists()
    assert main(tiny(tmp_path / "asked", *less, "trainer.num_threads=null")) == 0
    cores = torch.get_num_threads()
    found = json.loads((tmp_path / "asked/threads.json").read_text())
    assert list(map(int, found["ms_per_step"])) == candidates(cores)
    assert f"{found['num_threads']} threads on {cores} cores" in capsys.readouterr().out
