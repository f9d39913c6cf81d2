"""What stands in examples/ runs, as its README says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def example(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "custom_environment", tmp_path / "example")
    return tmp_path / "example"


def python(folder: Path, *arguments: str) -> str:
    """What a program prints that runs in an example's folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_trainer_runs_from_hydras_command_line(example: Path) -> None:
    python(
        example,
        "main.py",
        "--config-path=config",
        "--config-name=test_config",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
    )
    steps = lines_of(example / "test_run/metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2]
    rows = lines_of(example / "test_run/rollouts/2.jsonl")
    assert len(rows) == 8
    for row in rows:
        fields = row["extra_info"]
        position, goal = (int(word.removeprefix("->")) for word in row["input"].split()[:2])
        assert fields["state"] == f"State(position={position}, goal={goal})"
        assert fields["expected_action"] == ("+" if goal > position else "-")
        worth = {"+": 0.0, "-": 0.0} | {fields["expected_action"]: 1.0}
        assert row["score"] == worth.get(row["output"].split()[0], -1.0)
    assert (example / "test_run/global_step_2").is_dir()


def test_the_walk_throughs_own_checks(example: Path) -> None:
    printed = python(
        example,
        "-c",
        "from custom.env_dataset import CustomEnvDataset\n"
        "from your_environment import YourEnvironment\n"
        "\n"
        "env = YourEnvironment()\n"
        "from slipstream.data.tokenizer import build_tokenizer\n"
        "dataset = CustomEnvDataset(env, tokenizer=build_tokenizer())\n"
        "print(f'Dataset size: {len(dataset)}')\n"
        "print(f'Sample: {dataset[0]}')\n"
        "from custom.reward_manager import CustomRewardManager\n"
        "from slipstream.compat.verl import DataProto\n"
        "\n"
        "reward_fn = CustomRewardManager(env)\n"
        "ids = dataset.tokenizer('+ -', return_tensors='pt')['input_ids']\n"
        "states = [env.get_state(0)] * 2\n"
        "print(reward_fn(DataProto({'responses': ids.T}, {'state': states})).tolist())\n",
    )
    lines = printed.splitlines()
    assert lines[0] == "Dataset size: 512"
    assert "'prompt': '17 ->72 :'" in lines[1]
    assert lines[2] == "[1.0, 0.0]"
