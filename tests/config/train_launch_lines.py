"""Runs launch lines with small files and a tiny model, and prints a table of the outcomes.

`python -m tests.config.train_launch_lines [NAME ...]` makes the dry run of the named lines
(default: all accepted lines of `launch_lines`, and those of VERL's SFT below). With `--steps 2`,
each line trains two steps; overrides at its end shrink batches and lengths. Lines for vLLM use it
if SLIPSTREAM_VLLM_PYTHON names a Python that has it, and those for SGLang alike; the table shows
the engine of each run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml

from slipstream.build.policy import make_decoder
from slipstream.config import Config, Hardware, load_config
from slipstream.data.tokenizer import build_tokenizer
from slipstream.metrics.loggers import read_jsonl
from slipstream.models import save_checkpoint
from slipstream.models.config import ModelConfig
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import save_draft_head
from slipstream.models.lora import LoraConfig, add_lora, lora_layers
from slipstream.models.lora_io import save_adapter
from tests.config.launch_lines import LINES, REFUSED, arguments

POSITIONS = 40_960
"""Enough for the longest responses of the lines."""

SFT = """
data.train_batch_size=256 data.truncation=error optim.lr=2e-5 optim.weight_decay=0.1
optim.betas=[0.9,0.95] 'trainer.logger=["console","file"]' trainer.project_name=sft
trainer.experiment_name=line trainer.total_epochs=2 trainer.n_gpus_per_node=1 trainer.nnodes=1
"""
MESSAGES = """
data.train_files={data}/messages.parquet data.val_files={data}/messages.parquet
data.messages_key=messages data.pad_mode=no_padding data.max_length=2048 data.use_dynamic_bsz=True
data.max_token_len_per_gpu=8192 model.path={model} model.use_remove_padding=True
optim.lr_warmup_steps_ratio=0.01 optim.min_lr_ratio=0.1 optim.clip_grad=1.0
trainer.test_freq=after_each_epoch trainer.save_freq=-1 trainer.resume_mode=auto
trainer.max_ckpt_to_keep=5 checkpoint.save_contents=[model,optimizer,extra]
"""
ANSWERS = """
data.train_files={data}/answers.parquet data.val_files={data}/answers.parquet
data.prompt_key=extra_info data.response_key=extra_info data.micro_batch_size_per_gpu=4
data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] data.max_length=1024
model.partial_pretrain={model} trainer.default_hdfs_dir=null use_remove_padding=true
"""
SFT_LINES: dict[str, str] = {
    "sft": SFT
    + MESSAGES
    + "engine=fsdp optim=fsdp optim.warmup_style=cosine engine.strategy=fsdp2 "
    "engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2",
    "sft_megatron": SFT + MESSAGES + "engine=megatron optim=megatron optim.lr_decay_style=cosine "
    "engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2 "
    "engine.use_mbridge=True optim.lr_warmup_init=0",
    "fsdp_sft": SFT + ANSWERS + "model.fsdp_config.cpu_offload=True model.use_liger=True",
    "fsdp_sft_lora": SFT + ANSWERS + "model.lora_rank=32 model.lora_alpha=16 "
    "model.target_modules=all-linear model.strategy=fsdp ulysses_sequence_parallel_size=2",
}
"""Name -> line for `sft_trainer`, or for `fsdp_sft_trainer` if the name starts with `fsdp`."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    odd = float(len(solution_str) % 2)
    score = scale * (odd + len(set(solution_str)) / 8)
    return {"score": score, "acc": odd, "accuracy": odd, "format": len(solution_str) / 8}
"""
DATASET = """
from slipstream.compat.verl.utils.dataset.rl_dataset import RLHFDataset

class MyDataset(RLHFDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(item), "mine": item}
"""
SAMPLER = """
from slipstream.compat.verl.experimental.dataset.sampler import AbstractCurriculumSampler

class Mine(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.size = len(data_source)

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size

    def update(self, batch):
        pass
"""

SHRUNK = {
    "data.gen_batch_size": 12,
    "overlong_buffer.len": 4,
    "overlong_buffer_cfg.len": 4,
    "reward_kwargs.max_resp_len": 16,
    "ppo_micro_batch_size_per_gpu": 2,
    "rollout.n": 4,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.val_kwargs.n": 2,
    "speculative.train.training_interval_steps": 1,
}
"""End of a key -> the largest value with which a line that sets the key trains."""

SMALL = (
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.logger=[console,file]",
)
SMALL_SFT = ("data.train_batch_size=4", "data.max_length=64", "trainer.logger=[console,file]")


def write_files(root: Path) -> None:
    """Write the files that the lines name: data sets, code of users, and models."""
    from tests.training.test_reward_model import checkpoint

    data, tokenizer = root / "data", build_tokenizer()
    data.mkdir()
    questions = [(f"{i} + 1 =", str(i + 1)) for i in range(1600)]
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"question": question, "answer": answer, "index": i, "split": "train"},
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
        }
        for i, (question, answer) in enumerate(questions)
    ]
    table = pyarrow.Table.from_pylist(rows)
    for name in ("train", "messages", "answers"):
        pyarrow.parquet.write_table(table, data / f"{name}.parquet")
    pyarrow.parquet.write_table(table.slice(0, 4), data / "test.parquet")
    for name, code in (("reward", REWARD), ("mine", DATASET), ("sampler", SAMPLER)):
        (data / f"{name}.py").write_text(code, encoding="utf-8")

    # vLLM's kernels for CPUs need heads of this size.
    sizes = {"max_position_embeddings": POSITIONS, "hidden_size": 64, "head_dim": 32}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
    line = [f"actor_rollout_ref.model.init.{name}={value}" for name, value in sizes.items()]
    quiet: dict[str, Any] = {"hardware": Hardware(gpus=0), "notify": lambda _: None}
    config: Config = load_config(line, recipe="tiny", **quiet)
    decoder = make_decoder(config, tokenizer, None)
    assert isinstance(decoder.config, ModelConfig)
    save_checkpoint(decoder, root / "model", save_tokenizer=tokenizer.save_pretrained)
    checkpoint(data / "judge", positions=POSITIONS)
    torch.manual_seed(0)
    save_draft_head(DraftHead(decoder.config), data / "eagle")
    add_lora(decoder, LoraConfig(rank=4, alpha=8))
    for layer in lora_layers(decoder).values():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    save_adapter(decoder, data / "adapter", base_model=str(root / "model"))


def is_sft(name: str) -> bool:
    return name in SFT_LINES


def command(name: str, root: Path, steps: int | None) -> tuple[str, list[str]]:
    """Return the module of the launcher, and the arguments of a dry run or of `steps` steps."""
    data, model = str(root / "data"), str(root / "model")
    if is_sft(name):
        text = SFT_LINES[name].replace("{data}", data).replace("{model}", model)
        launcher, line = name.partition("sft")[0] + "sft_trainer", shlex.split(text)
    else:
        launcher = "main_fastrl" if name.startswith("fastrl") else "main_ppo"
        line = arguments(name, data, model)
    given = dict(argument.partition("=")[::2] for argument in line)
    line += ["trainer.device=cpu", f"trainer.default_local_dir={root / 'runs' / name}"]
    if steps is None:
        return launcher, [*line, "--dry-run"]
    line += SMALL_SFT if is_sft(name) else SMALL
    line += [
        f"{key}={most}"
        for key, value in given.items()
        for end, most in SHRUNK.items()
        if is_end(key, end) and int(value) > most
    ]
    line += [f"trainer.total_training_steps={steps}"]
    scored = ("reward_function.path", "reward_model.enable")
    if not is_sft(name) and not any(key.endswith(scored) for key in given):
        # The answers of an untrained model are wrong, so the line's own scores are all equal.
        line += [f"custom_reward_function.path={data}/reward.py"]
        line += ["custom_reward_function.name=compute_score"]
    return launcher, line


def is_end(key: str, end: str) -> bool:
    """Return whether the dotted `key` ends with the parts of `end`."""
    return f".{key.lstrip('+')}".endswith(f".{end}")


def outcome(name: str, root: Path, steps: int | None, timeout: float) -> tuple[int | str, str]:
    """Run one line in a process. Return its exit code, and its error or its metrics."""
    launcher, line = command(name, root, steps)
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"slipstream.{launcher}", *line],
            cwd=root,  # some lines write to relative paths
            env={"WANDB_MODE": "offline"} | os.environ | {"PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "none", f"no end within {timeout:.0f} s"
    if done.returncode:
        _, found, error = done.stderr.rpartition("error: ")
        return done.returncode, f"{found}{error}".strip()[:600]
    return 0, "" if steps is None else trained(root / "runs" / name, sft=is_sft(name))


def trained(run: Path, *, sft: bool) -> str:
    """Return the number of steps of a run, and metrics of its last step."""
    found = dict(read_jsonl((run / "sft" if sft else run) / "metrics.jsonl"))
    last = max(found)
    if sft:
        names: tuple[str, ...] = ("sft/loss", "sft/grad_norm")
    else:
        names = (
            "critic/score/mean",
            "actor/grad_norm",
            "actor/kl_loss",
            "critic/grad_norm",
            "drafter/updates",
            "drafter/accept_length/after",
        )
    shown = [f"{n}={found[last][n]:.4g}" for n in names if n in found[last]]
    return " ".join([f"engine={engine_of(run)}", f"steps={last}", *shown])


def engine_of(run: Path) -> str:
    """Return the name of the engine that generated a run's responses."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    name: str = config["actor_rollout_ref"]["rollout"]["name"]
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description="Run launch lines with small files and models.")
    parser.add_argument("--steps", type=int, help="train, instead of the dry run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per line")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    accepted = [*(name for name in LINES if name not in REFUSED), *SFT_LINES]
    with TemporaryDirectory(prefix="launch_lines_") as folder:
        root = Path(folder)
        write_files(root)
        passed = 0
        for name in args.names or accepted:
            start = time.perf_counter()
            code, text = outcome(name, root, args.steps, args.timeout)
            passed += code == 0
            print(f"{name:32} {code!s:4} {time.perf_counter() - start:5.1f} s  {text}", flush=True)
    print(f"{passed} of {len(args.names or accepted)} lines exit with 0")


if __name__ == "__main__":
    main()
