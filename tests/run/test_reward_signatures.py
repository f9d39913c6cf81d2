"""One reward written in every supported signature gives equal runs, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from tests.run.helpers import assert_same_result, records_of, result_of, rl_only

CODE = """
import asyncio
import torch

def worth(text, truth, level):
    return float((len(set(text.split())) + int(truth)) % 3 + level)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return worth(solution_str, ground_truth, extra_info["level"])

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return {"score": worth(solution_str, ground_truth, extra_info["level"])}

def lists(data_sources, solution_strs, ground_truths, extra_infos):
    rows = zip(solution_strs, ground_truths, extra_infos)
    return [worth(text, truth, extra["level"]) for text, truth, extra in rows]

def compute_reward(data, **kwargs):
    rewards = torch.zeros(len(data.batch))
    for i in range(len(data.batch)):
        level = data.batch["level"][i]
        rewards[i] = worth(data.responses[i], data.ground_truth_answers[i], level)
    return rewards

def of_tokens(data):
    rewards = torch.zeros(data.batch["responses"].shape)
    lengths = data.batch["response_mask"].sum(1)
    rewards[torch.arange(len(data)), lengths - 1] = compute_reward(data)
    return {"reward_tensor": rewards, "reward_extra_info": {}}

def trls(prompts, completions, ground_truth, level, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [worth(*row) for row in zip(texts, ground_truth, level)]
"""

FUNCTIONS = (
    ("later", "naive"),
    ("lists", "naive"),
    ("lists", "batch"),
    ("compute_reward", "naive"),
    ("compute_reward", "batch"),
    ("of_tokens", "naive"),
    ("trls", "naive"),
    ("trls", "batch"),
    ("compute_score", "prime"),
)


def run(root: Path, folder: str, function: str, manager: str) -> Path:
    line = rl_only(
        root / folder,
        "data.task=null",
        f"data.tokenizer={root / 'tokenizer'}",
        f"data.train_files={root / 'rows.jsonl'}",
        f"custom_reward_function.path={root / 'mine.py'}",
        f"custom_reward_function.name={function}",
        f"reward_model.reward_manager={manager}",
    )
    assert main(line) == 0
    return root / folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose reward function has VERL's signature for one response."""
    root = tmp_path_factory.mktemp("signatures")
    (root / "mine.py").write_text(CODE)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
            "reward_model": {"ground_truth": str(i)},
            "level": i % 2,
        }
        for i in range(4)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_tokenizer(build_tokenizer(), root / "tokenizer")
    return run(root, "first", "compute_score", "naive")


@pytest.mark.parametrize(("function", "manager"), FUNCTIONS)
def test_every_reward_signature_gives_the_same_run(
    first: Path, function: str, manager: str
) -> None:
    other = run(first.parent, f"{function}-{manager}", function, manager)
    assert_same_result(result_of(other), result_of(first))
    scores = {row["score"] for rows in records_of(other / "rollouts").values() for row in rows}
    assert len(scores) > 1
