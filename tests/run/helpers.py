"""Helpers for tiny runs through the command line, in this process or in child processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.build.policy import make_decoder
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import huggingface_folder
from slipstream.config import Hardware, load_config
from slipstream.data.tokenizer import build_tokenizer
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.names import deterministic
from slipstream.models import save_checkpoint
from slipstream.models.lora_io import ADAPTER_CONFIG

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return {"score": len(set(words)) / 8 + len(words) % 3, "acc": float(len(words) % 2)}
"""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def write_reward(folder: Path, source: str = REWARD) -> Path:
    """Write a reward function whose scores differ between responses of an untrained model."""
    path = folder / "reward.py"
    path.write_text(source, encoding="utf-8")
    return path


def save_tiny_model(folder: Path) -> None:
    """Write the untrained model of the recipe `tiny` and its tokenizer to `folder`."""
    tokenizer = build_tokenizer()
    config = load_config(recipe="tiny", hardware=Hardware(gpus=0), notify=lambda _: None)
    decoder = make_decoder(config, tokenizer, None)
    save_checkpoint(decoder, folder, save_tokenizer=tokenizer.save_pretrained)


def tiny(folder: Path, *overrides: str, reward: Path | None = None) -> list[str]:
    """Arguments that train the tiny recipe into `folder` on one thread."""
    line = [
        "train",
        "--recipe",
        "tiny",
        f"trainer.default_local_dir={folder}",
        "trainer.num_threads=1",
        "trainer.log_val_generations=0",
        *overrides,
    ]
    return [*line, f"custom_reward_function.path={reward}"] if reward is not None else line


def rl_only(folder: Path, *overrides: str, reward: Path | None = None) -> list[str]:
    """Like `tiny`, but without SFT."""
    return tiny(
        folder,
        "sft.total_training_steps=0",
        "trainer.val_before_train=false",
        *overrides,
        reward=reward,
    )


def policy(root: Path, step: int) -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    folder = huggingface_folder(root / f"global_step_{step}")
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return weights


def steps_of(root: Path) -> list[int]:
    return CheckpointManager(root, keep=None).steps()


def metrics_of(root: Path) -> dict[int, dict[str, float]]:
    """The metrics in which equal runs agree, by step. Fails if a step is logged twice."""
    lines = read_jsonl(root / "metrics.jsonl")
    assert len({step for step, _ in lines}) == len(lines), "a step is logged twice"
    return {step: deterministic(metrics) for step, metrics in lines}


def records_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Recorded rollouts by file name."""
    return {
        path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def result_of(folder: Path) -> dict[str, Any]:
    """Everything in which a resumed run and an uninterrupted one must be equal, bit for bit."""
    result: dict[str, Any] = {}
    for phase, root in (("sft", folder / "sft"), ("rl", folder)):
        if not root.is_dir() or (latest := CheckpointManager(root, keep=None).latest()) is None:
            continue
        result[f"{phase} checkpoint"] = latest.name
        for path in sorted(latest.rglob("*")):
            # state.json contains the name of the folder, and the manifest counts saves.
            if path.is_file() and path.name not in ("state.json", "manifest.json"):
                result[f"{phase} {path.relative_to(latest)}"] = _content(path)
        state = json.loads((latest / "state.json").read_text(encoding="utf-8"))
        del state["config"]
        result[f"{phase} state"] = state
        result[f"{phase} metrics"] = metrics_of(root)
    for name in ("rollouts", "validation"):
        result[name] = {path.name: path.read_bytes() for path in (folder / name).glob("*.jsonl")}
    return result


def _content(path: Path) -> Any:
    """The bytes of a file. For safetensors, whose header has no fixed order, the parsed header and
    the bytes of the tensors."""
    raw = path.read_bytes()
    if path.name == ADAPTER_CONFIG:
        # It names the folder that RL started from, which is inside the run folder.
        return {k: v for k, v in json.loads(raw).items() if k != "base_model_name_or_path"}
    if path.suffix != ".safetensors":
        return raw
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def without_validation(result: dict[str, Any], step: int) -> dict[str, Any]:
    """Remove the validation after RL step `step` from a result of `result_of`."""
    metrics = result["rl metrics"][step]
    kept = {name: value for name, value in metrics.items() if not name.startswith("val-")}
    validation = {n: v for n, v in result["validation"].items() if n != f"{step}.jsonl"}
    rl = {**result["rl metrics"], step: kept}
    return {**result, "rl metrics": rl, "validation": validation}


def assert_same_result(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if left[name] != right[name]]
    assert different == [], f"different: {different}"


def start(line: Sequence[str], output: Path) -> BaseProcess:
    """Start the command line in a child process, forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.run.preload"])
    process = context.Process(target=_child, args=(list(line), str(output)))
    process.start()
    return process


def finish(process: BaseProcess, output: Path, *, timeout: float = 120.0) -> int:
    """Wait for the process and return its exit code; fail with its output if it does not end."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"no end within {timeout} s:\n{output.read_text(encoding='utf-8')}")
    return process.exitcode


def _child(line: list[str], output: str) -> None:
    with open(output, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from slipstream.cli import main

    sys.exit(main(line))


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables that child processes inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def assert_same_rl(one: Path, other: Path, steps: int = 4) -> None:
    """Two runs of `steps` RL steps must have the same rollouts and policy weights."""
    ours, theirs = policy(one, steps), policy(other, steps)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for step in range(1, steps + 1):
        name = f"rollouts/{step}.jsonl"
        assert (one / name).read_bytes() == (other / name).read_bytes()
