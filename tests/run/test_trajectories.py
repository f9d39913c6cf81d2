"""SFT on conversations with tool calls that `slipstream data trajectories` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.data.lookup import SCHEMA, LookupTask
from slipstream.data.sft import load_sft_samples, sft_samples
from slipstream.data.tokenizer import save_tokenizer
from slipstream.metrics.loggers import read_jsonl
from tests.data.agent_records import write
from tests.run.helpers import tiny

COUNT, STEPS = 12, 4


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    """Demonstrations as an OpenAI client records them: calls without text have a null content, and
    arguments are JSON texts."""
    records = []
    for number in range(COUNT):
        messages = LookupTask(0).demonstration("train", number)
        for message in messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"])
                message["content"] = None if number % 2 else message["content"]
        records.append({"messages": messages, "tools": [SCHEMA], "reward": 1})
    return write(tmp_path / "agent.jsonl", *records)


def test_trajectories_with_tool_calls_are_trained_on(trajectories: Path) -> None:
    folder = trajectories.parent
    rows, tokenizer = folder / "rows.jsonl", folder / "tokenizer"
    task = LookupTask(0)
    save_tokenizer(task.tokenizer, tokenizer)
    line = ["data", "trajectories", str(trajectories), "--to", "sft", "--output", str(rows)]
    assert main([*line, "--tokenizer", str(tokenizer)]) == 0
    # Rows with text before each call have the tokens and masks of the demonstrations.
    found = load_sft_samples(rows, task.tokenizer)
    expected = list(sft_samples(task, task.tokenizer, 0, COUNT))
    for one, other in list(zip(found, expected, strict=True))[::2]:
        assert (one.tokens, one.loss_mask) == (other.tokens, other.loss_mask)
    train = tiny(
        folder / "run",
        "data.task=null",
        f"data.tokenizer={tokenizer}",
        f"sft.train_files=[{rows}]",
        f"sft.total_training_steps={STEPS}",
        "sft.batch_tokens=1024",
        "sft.max_tokens_per_micro_batch=1024",
        "sft.optim.lr=1e-2",
    )
    assert main(["sft", *train[1:]]) == 0
    steps = [metrics for step, metrics in read_jsonl(folder / "run/sft/metrics.jsonl") if step > 0]
    assert len(steps) == STEPS
    losses = [metrics["sft/loss"] for metrics in steps]
    assert losses[-1] < losses[0]
