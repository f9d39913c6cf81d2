"""RL with SGLang's contract server in place of SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import main_ppo
from slipstream.cli import main
from slipstream.config.engines import SERVED
from slipstream.metrics.loggers import read_jsonl
from tests.inference.servers import local
from tests.run.helpers import ROLLOUT, records_of, rl_only
from tests.test_from_verl import line as verl_line


def test_a_run_with_two_servers_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = rl_only(
        folder,
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.server.python={local.python(tmp_path)}",
        f"{ROLLOUT}.server.replicas=2",
        f"{ROLLOUT}.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "speculative.enable=false",
    )
    assert main(line) == 0
    metrics = dict(read_jsonl(folder / "metrics.jsonl"))
    assert sorted(metrics) == [1, 2]
    for found in metrics.values():
        assert found["training/rollout_probs_diff_max"] < 1e-4
    assert sorted(path.name for path in (folder / "servers").iterdir()) == [
        "sglang-0.log",
        "sglang-1.log",
    ]


def test_a_line_of_verl_generates_with_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVED["sglang"], str(local.python(tmp_path)))
    assert main_ppo.main(verl_line(tmp_path)) == 0
    assert f"{ROLLOUT}.name=embedded" not in capsys.readouterr().err
    folder = tmp_path / "run"
    assert (folder / "servers" / "sglang-0.log").exists()
    metrics = dict(read_jsonl(folder / "metrics.jsonl"))
    assert sorted(metrics) == [0, 1, 2]
    rows = [row for rows in records_of(folder / "rollouts").values() for row in rows]
    assert len(rows) == 2 * 4 * 5
