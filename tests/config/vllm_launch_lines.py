"""Launch lines of VERL that train with vLLM, and what their runs must show."""

from __future__ import annotations

from pathlib import Path

import yaml

from slipstream.metrics.loggers import read_jsonl
from tests.config.train_launch_lines import outcome

IN_CI = ("grpo", "dapo_recipe", "ppo")
"""Lines that train against the contract server."""

WITH_VLLM = (*IN_CI, "grpo_async", "grpo_lora", "newer_gspo")
"""Lines that train with a real vLLM."""

STEPS = 2


def train(name: str, root: Path) -> str:
    """Train `STEPS` steps of a line in `root`, check that servers of vLLM generated all responses
    with the trainer's weights, and return a row for the table of lines."""
    code, text = outcome(name, root, STEPS, 900.0)
    run = root / "runs" / name
    assert code == 0, text
    assert text.startswith(f"engine=vllm steps={STEPS} ")
    rollout = yaml.safe_load((run / "config.yaml").read_text())["actor_rollout_ref"]["rollout"]
    assert rollout["name"] == "vllm"
    assert len(list((run / "servers").glob("vllm-*.log"))) == 1
    found = dict(read_jsonl(run / "metrics.jsonl"))
    for step in range(1, STEPS + 1):
        metrics = found[step]
        # The server was compared with the trainer, and showed the weights of each update.
        assert metrics["server/checks/new"] + metrics.get("server/checks/undecided", 0) >= 1
        assert not metrics.keys() & {"server/checks/old", "server/checks/wrong"}
        assert metrics["training/rollout_probs_diff_max"] < 0.05
    return f"{name:16} {text}"
