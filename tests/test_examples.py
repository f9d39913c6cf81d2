"""The programs in examples/ run, and give the results that their README states."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
import torch

from slipstream.data.data_buffer import DataBuffer
from slipstream.data.tokenizer import build_tokenizer
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.loops.rl import RLTrainingConfig, run_rl_training
from slipstream.metrics.timers import Timers
from slipstream.models import Decoder
from slipstream.models.numerics import rows_are_exact
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.scorers.reasoning_gym import compute_score
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.types import Group, Sample, SamplingParams, TrainBatch
from tests.training.helpers import as_rows, observe

ROOT = Path(__file__).parent.parent


@pytest.fixture
def example(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "custom_environment", tmp_path / "example")
    return tmp_path / "example"


def python(folder: Path, *arguments: str) -> str:
    """Run a Python program in the folder of an example and return its output."""
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


def test_custom_environment_trains_from_hydras_command_line(example: Path) -> None:
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


def test_custom_environment_walkthrough_checks_pass(example: Path) -> None:
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


@pytest.fixture(scope="module")
def from_scratch() -> Iterator[ModuleType]:
    """`examples/grpo_from_scratch.py` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("grpo_from_scratch")


@pytest.fixture(scope="module")
def imitation(from_scratch: ModuleType) -> Decoder:
    """The policy that both loops start from. Tests must not change it."""
    policy = from_scratch.imitate()
    assert isinstance(policy, Decoder)
    return policy


@dataclass
class LibraryRun:
    """Results of the library's RL loop: the samples of all steps in order, the batch of each
    optimizer step, the metrics of each step and the final weights."""

    samples: list[Sample] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    accept_length: float = 1.0


def run_library(script: ModuleType, policy: Decoder, steps: int) -> LibraryRun:
    """Run `run_rl_training` with the settings of `script` and with history drafts."""
    run, tokenizer = LibraryRun(), script.TASK.tokenizer
    backend = SingleProcessBackend(
        copy.deepcopy(policy),
        optim=OptimSettings(lr=script.LEARNING_RATE, weight_decay=0.0),
        # The script computes one response at a time.
        max_tokens_per_micro_batch=None,
        max_rows_per_micro_batch=1,
        grad_clip=script.MAX_GRAD_NORM,
    )
    run.batches = observe(backend, copy.deepcopy)
    engine = EmbeddedEngine(
        copy.deepcopy(policy),
        EngineSettings(max_model_len=64, dtype=torch.float32, kv_budget_bytes=1 << 24),
        proposer=HistoryProposer(match=2),
        plan=DraftPlan.chain(script.NUM_DRAFTS),
    )
    buffer = DataBuffer(script.PROMPTS, shuffle=False)
    rewards = NaiveRewardManager(
        script.compute_score, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    )
    stop = (tokenizer.eos_token_id,)
    settings = RolloutSettings(
        batch_size=script.PROBLEMS,
        n=script.GROUP_SIZE,
        params=SamplingParams(max_tokens=script.MAX_NEW_TOKENS, stop_token_ids=stop),
        seed=script.SEED,
    )
    rollouts = AsyncRolloutManager([engine], buffer, rewards, settings)
    config = RLTrainingConfig(
        num_steps=steps,
        max_prompt_length=16,
        max_response_length=script.MAX_NEW_TOKENS,
        ppo_epochs=script.EPOCHS,
    )

    async def keep(
        step: int, groups: Sequence[Group], metrics: dict[str, float], timers: Timers
    ) -> bool:
        run.samples += [sample for group in groups for sample in group.samples]
        return False

    async def work() -> list[dict[str, float]]:
        return await run_rl_training(
            backend, buffer, rollouts, [engine], config, after_step=keep, notify=lambda text: None
        )

    try:
        run.history = anyio.run(work)
        run.weights = backend.get_weights().wait()
        run.accept_length = engine.stats().accept_length
    finally:
        backend.close()
        engine.close()
    return run


@pytest.mark.parametrize("products", ["kernels", "torch"])
def test_grpo_from_scratch_computes_the_same_bits_as_the_library(
    from_scratch: ModuleType,
    imitation: Decoder,
    products: str,
    request: pytest.FixtureRequest,
) -> None:
    if products == "torch":
        request.getfixturevalue("without_kernels")
    if not rows_are_exact(torch.float32, torch.device("cpu")):
        pytest.skip("on this CPU a row's bits depend on the other rows of a matrix product")
    steps, policy = 2, copy.deepcopy(imitation)
    samples, losses = from_scratch.train(policy, from_scratch.NUM_DRAFTS, steps)
    library = run_library(from_scratch, imitation, steps)

    # Both loops use drafts, but different ones, and sample the same tokens.
    assert library.accept_length > 1.3
    tokens = sum(len(s.log_probs) for s in samples)
    assert tokens > 1.3 * sum(s.forward_passes for s in samples)
    assert [s.tokens for s in samples] == [s.tokens for s in library.samples]
    assert [s.log_probs for s in samples] == [
        s.rollout_log_probs[len(s.prompt_ids) :] for s in library.samples
    ]

    assert [s.reward for s in samples] == [s.reward for s in library.samples]
    assert {s.reward for s in samples} == {0.0, 1.0}
    per_step, epochs = from_scratch.PROBLEMS * from_scratch.GROUP_SIZE, from_scratch.EPOCHS
    assert len(library.batches) == steps * epochs
    for number, batch in enumerate(library.batches):
        first = number // epochs * per_step
        for s, row in zip(samples[first : first + per_step], as_rows(batch), strict=True):
            start = len(s.prompt.ids)
            assert row.tokens == s.tokens
            assert row.advantages is not None
            assert row.advantages[start:] == [s.advantage] * len(s.log_probs)
            # The library recomputes the old log-probs; they equal those of the rollout.
            assert row.old_log_probs is not None
            assert row.old_log_probs[start:] == s.log_probs

    assert losses == [metrics["actor/pg_loss"] for metrics in library.history]
    assert all(metrics["actor/pg_clipfrac"] > 0 for metrics in library.history)
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, library.weights[name]), name
        assert not torch.equal(weight, imitation.get_parameter(name)), name


def test_grpo_from_scratch_learns_the_same_with_and_without_drafts() -> None:
    script = ROOT / "examples/grpo_from_scratch.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 200
    printed = python(script.parent, script.name)
    steps = re.findall(r"^step \d+: reward (\S+), loss (\S+), tokens/pass (\S+)$", printed, re.M)
    drafted, plain = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert len(drafted) == len(plain) > 3
    pairs = list(zip(drafted, plain, strict=True))
    assert [step[:2] for step in drafted] == [step[:2] for step in plain]
    assert float(drafted[-1][0]) > float(drafted[0][0]) + 0.1
    assert all(float(fast[2]) > 1.3 and slow[2] == "1.00" for fast, slow in pairs)
    last = printed.splitlines()[-1]
    passes = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", last)]
    assert 1.3 * passes[0] < passes[1]
    assert last.endswith("token ids equal: True; weights equal: True")


def test_search_demonstrations_are_right_unless_they_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "real_model"))
    example = importlib.import_module("search_task")
    assert example.tries([3, 5]) == [(3, 5), (5, -3)]
    assert example.written((5, 2, -3)) == "5 + 2 - 3"
    tokenizer = build_tokenizer()
    for give_up, right in ((0.0, [True] * 8), (0.999999, None)):
        task = example.GymSearchTask(
            tokenizer=tokenizer, give_up=give_up, max_numbers=3, max_prompt_length=4096
        )
        scores = []
        for index in range(8):
            prompt = task.prompt("train", index)
            answer = str(task.demonstration("train", index)[-1]["content"])
            graded = compute_score(prompt.data_source, answer, None, prompt.extra_info)
            scores.append(graded["acc"] == 1.0)
            assert answer.count("\n") == 1 or not give_up
            *failed, last, _ = answer.split("\n")
            assert all(line.endswith("? no") for line in failed)
            assert last.endswith("? yes") == scores[-1]
        assert scores == right if right else not all(scores)
