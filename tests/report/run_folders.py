"""Creates run folders with known numbers, in the format that a run writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = """\
trainer:
  total_training_steps: 4
  rollout_data_dir: null
data:
  task: countdown
"""

STEP = {
    "critic/score/mean": 0.5,
    "response_length/median": 10.0,
    "response_length/mean": 12.0,
    "response_length/p90": 20.0,
    "response_length/max": 30.0,
    "training/rollout_log_probs_differing": 0.0,
    "rollout/tokens_per_second": 100.0,
    "perf/total_num_tokens": 1000.0,
    "spec/accept_length": 3.5,
    "spec/acceptance_rate_1": 0.9,
    "spec/acceptance_rate_2": 0.7,
    "spec/plan_seconds/bs_4/3_1_4": 0.3,
    "spec/plan_seconds/bs_1/off": 0.1,
    "spec/plan_seconds/bs_1/6_1_7": 0.3,
    "timing_s/gen": 1.0,
    "timing_s/gen/prefill": 0.1,
    "timing_s/gen/decode": 0.2,
    "timing_s/gen/draft": 0.25,
    "timing_s/gen/verify": 0.4,
    "timing_s/gen/wait": 0.05,
    "timing_s/reward": 0.5,
    "timing_s/update_actor": 2.0,
    "timing_s/sync": 0.25,
    "timing_s/other": 0.25,
    "timing_s/step": 4.0,
    "timing_s/dump_rollout_generations": 0.5,
}
"""Metrics of an RL step; its times add up."""

VALIDATION = {
    "val-core/countdown/acc/mean@1": 0.6,
    "val-aux/countdown/acc/mean@1/ci_low": 0.55,
    "val-aux/countdown/acc/mean@1/ci_high": 0.65,
}


def make_run(
    folder: Path,
    *,
    steps: int = 4,
    config: str = CONFIG,
    more: Mapping[int, Mapping[str, float]] | None = None,
) -> Path:
    """Create the folder of a finished run.

    Start-up takes 3 s and set-up 2 s, then each of the `steps` RL steps 4.5 s. After the last step,
    validation takes 1 s and the checkpoint 0.5 s. With 4 steps the run takes 30 s, of which 5.5 s
    are not measured. `more` is added to the records of some steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    records = [line(0, 106.0, VALIDATION | {"val-core/countdown/acc/mean@1": 0.4})]
    now = 106.0
    for step in range(1, steps + 1):
        now += 4.5
        data = STEP | (VALIDATION if step == steps else {}) | dict((more or {}).get(step, {}))
        records.append(line(step, now, data))
    (folder / "metrics.jsonl").write_text("".join(records))
    end = now + 1.5
    events: list[dict[str, Any]] = [
        {"time": 100.0, "event": "start", "argv": ["slipstream", "rl"],
         "environment": {"cpu": "A processor", "slipstream": "0.1.0"}},
        {"time": 103.0, "event": "begin", "span": "setup"},
        {"time": 105.0, "event": "end", "span": "setup", "seconds": 2.0},
        {"time": 105.0, "event": "begin", "span": "rl"},
        {"time": now, "event": "begin", "span": "testing"},
        {"time": now + 1, "event": "end", "span": "testing", "seconds": 1.0},
        {"time": now + 1, "event": "begin", "span": "save_checkpoint"},
        {"time": end, "event": "end", "span": "save_checkpoint", "seconds": 0.5},
        {"time": end, "event": "end", "span": "rl", "seconds": end - 105.0},
        {"time": end + 4.5, "event": "stop", "status": "finished"},
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    rollouts, tokens = folder / "rollouts", folder / "rollouts" / "tokens"
    tokens.mkdir(parents=True)
    for step in range(1, steps + 1):
        rows = [{"response_ids": [1] * (10 * step + i)} for i in range(3)]
        (rollouts / f"{step}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tokens / f"{step}.jsonl").write_text(json.dumps(sample(step)) + "\n")
    return folder


def line(step: int, when: float, data: Mapping[str, float]) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps({"step": step, "time": when, "data": data}) + "\n"


def sample(step: int) -> dict[str, Any]:
    """Return a response of three tokens; the second is drafted, the third is a tool's."""
    return {
        "uid": f"p{step}", "index": 0, "input": "1 2 ->3 :", "pieces": ["1", " +", " <b>"],
        "log_probs": [-0.5, -0.0101, None], "drafted": "010", "masked": "001", "score": 1.0,
        "gts": "{'target': 3}", "status": "completed", "stop_reason": "eos", "failure": None,
    }  # fmt: skip
