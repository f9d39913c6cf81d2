"""Launch lines of VERL that train with servers, and what their runs must show."""

from __future__ import annotations

from pathlib import Path

from slipstream.metrics.loggers import read_jsonl
from tests.config.train_launch_lines import outcome

IN_CI = {"grpo": "vllm", "dapo_recipe": "vllm", "ppo": "vllm", "grpo_sglang": "sglang"}
"""Line that trains against the contract server -> its engine."""

WITH_VLLM = ("grpo", "dapo_recipe", "ppo", "grpo_async", "grpo_lora", "newer_gspo")
"""Lines that train with a real vLLM."""

STEPS = 2


def train(name: str, root: Path, engine: str) -> str:
    """Train `STEPS` steps of a line in `root`, check that a server of `engine` generated all
    responses with the trainer's weights, and return a row for the table of lines."""
    code, text = outcome(name, root, STEPS, 900.0)
    run = root / "runs" / name
    assert code == 0, text
    assert text.startswith(f"engine={engine} steps={STEPS} ")
    assert [log.name for log in (run / "servers").iterdir()] == [f"{engine}-0.log"]
    found = dict(read_jsonl(run / "metrics.jsonl"))
    for step in range(1, STEPS + 1):
        metrics = found[step]
        # The server was compared with the trainer, and showed no other weights.
        assert metrics["server/checks/new"] + metrics["server/checks/undecided"] >= 1
        assert metrics["server/checks/old"] + metrics["server/checks/wrong"] == 0
        assert metrics["training/rollout_probs_diff_max"] < 0.05
    return f"{name:16} {text}"
