"""The GSM8K recipe of docs/getting_started.md and the scripts of examples/ for large models, run
with a tiny Qwen2.5 and data in the folder layout of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream import cli
from slipstream.metrics.loggers import read_jsonl
from slipstream.models import Decoder
from slipstream.models.hf_io import load_config
from tests.docs.pages import DOCS, ROOT, commands

MODEL = "models/Qwen2.5-0.5B-Instruct"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}
QUESTIONS = [
    {
        "question": f"Ann has {n} pears and buys {n + 1} more. How many has she?",
        "answer": f"She has {n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} pears.\n"
        f"#### {2 * n + 1}",
    }
    for n in range(2, 10)
]


def write_data(folder: Path) -> None:
    """Write data in the layout of the Hub: a folder per configuration, each split in parts."""
    for config in ("main", "socratic"):
        (folder / config).mkdir(parents=True)
        for split in ("train", "test"):
            table = pyarrow.Table.from_pylist(QUESTIONS)
            pyarrow.parquet.write_table(table, folder / config / f"{split}-00000-of-00001.parquet")


def write_model(folder: Path, *, layers: int = 2) -> None:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(q) for q in QUESTIONS), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": CHAT,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
    }
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    files = {
        "config.json": {**CONFIG, **ends, "vocab_size": 336, "num_hidden_layers": layers},
        "tokenizer_config.json": settings,
        "generation_config.json": {
            **ends,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "temperature": 0.7,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    decoder = Decoder(load_config(folder))
    decoder.init_weights(0)
    weights = {name: p.detach().to(torch.bfloat16) for name, p in decoder.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_gsm8k_recipe_of_getting_started_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(Path("downloads/gsm8k"))
    write_model(Path(MODEL))
    shown = [
        list(c.words[1:])
        for c in commands(DOCS / "getting_started.md")
        if any("gsm8k" in word for word in c.words)
    ]
    prepare, train = shown
    assert cli.main(prepare) == 0
    quick = (
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.num_threads=1",
        "trainer.device=cpu",
        "data.train_batch_size=2",
        "data.max_response_length=12",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert cli.main([*train, *quick]) == 0
    logged = dict(read_jsonl(Path("runs/gsm8k/metrics.jsonl")))
    assert set(logged) >= {1, 2}
    assert "val-core/openai/gsm8k/acc/mean@1" in logged[2]
    (responses,) = Path("runs/gsm8k/rollouts").glob("2.jsonl")
    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    assert len(rows) == 4
    # The prompt is the question in the chat template of the model.
    assert all("<|im_start|>user\nAnn has" in row["input"] for row in rows)
    assert all(row["gts"] in {str(2 * n + 1) for n in range(2, 10)} for row in rows)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Change to a folder with the files that the scripts for large models need; returns the
    environment variables for them."""
    monkeypatch.chdir(tmp_path)
    write_data(Path("downloads/gsm8k"))
    write_model(Path(MODEL))
    assert cli.main(["data", "gsm8k", "downloads/gsm8k/main", "--output", "data"]) == 0
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MODEL": MODEL,
        "TRAIN": "data/train.parquet",
        "VAL": "data/test.parquet",
    }


def run_script(name: str, environment: dict[str, str], *more: str) -> str:
    """Run a script of examples/ and return its output."""
    done = subprocess.run(
        ["bash", ROOT / "examples" / name, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tried(script: str, environment: dict[str, str], *more: str) -> list[str]:
    """Run a script with `--dry-run` on a CPU and without its draft head, which belongs to the large
    model. Returns the printed lines."""
    said = run_script(
        script,
        environment,
        *("--dry-run", "trainer.device=cpu", "trainer.num_threads=1"),
        *("speculative.spec_strategy=history", "speculative.eagle.spec_model_path=null"),
        *more,
    )
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert any(line.startswith("RL 1/1") for line in lines)
    assert not Path("runs").exists()
    return lines


def test_grpo_7b_script_runs_a_dry_run(large: dict[str, str]) -> None:
    lines = tried("grpo_7B.sh", large, "trainer.n_gpus_per_node=0", "data.train_batch_size=8")
    assert "RL step 8 prompts x 8 responses = 64 samples" in lines
    assert "optimizer steps 2 per RL step, each on 4 prompts = 32 samples" in lines


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >> srun.log; shift; done
exec "$@"
"""
"""A fake `srun`: the second node of the job is this machine, too."""


def test_multi_node_script_runs_a_dry_run_on_two_nodes(large: dict[str, str]) -> None:
    srun = Path("srun")
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slurm = {
        "HOME": os.getcwd(),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "GPUS": "0",
        "HEAD_ADDRESS": "127.0.0.1",
        "RAY_PORT": str(port),
    }
    more = "data.max_response_length=512", "data.train_batch_size=8"
    lines = tried("grpo_32B_multi_nodes.sh", {**large, **slurm}, *more)
    flags = ["--nodes=1", "--ntasks=1", "--relative=1", "--cpus-per-task=1"]
    assert Path("srun.log").read_text().split() == flags
    assert "RL step 8 prompts x 8 responses = 64 samples" in lines
    assert "processes 2; they share samples and weights" in lines
    assert "optimizer steps 1 per RL step, each on 8 prompts = 64 samples" in lines
    # Each Ray node has room for one process.
    assert "Ray runtime started" in Path("ray-others.log").read_text()


def test_eagle_train_script_trains_a_head(large: dict[str, str]) -> None:
    shutil.rmtree(MODEL)
    # An EAGLE-3 head needs three auxiliary layers.
    write_model(Path(MODEL), layers=8)
    run_script(
        "eagle_train.sh",
        {**large, "OUT": "head"},
        *("data.max_prompt_length=96", "data.max_response_length=16"),
        *("speculative.draft.total_training_steps=3", "speculative.draft.optim.lr_warmup_steps=1"),
        "speculative.eagle.draft_vocab_size=64",
        *("trainer.device=cpu", "trainer.num_threads=1"),
    )
    head = json.loads(Path("head/global_step_3/draft/config.json").read_text())
    assert (head["draft_vocab_size"], head["vocab_size"]) == (64, 336)
    assert list(dict(read_jsonl(Path("head/metrics.jsonl")))) == [0, 1, 2, 3]


def test_bench_sd_script_writes_results_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = "trainer.num_threads=1", "trainer.device=cpu"
    sft = ["sft", "--recipe", "tiny", "trainer.default_local_dir=run", *quick]
    assert cli.main(sft) == 0
    draft = "speculative.draft.total_training_steps=3", "speculative.draft.optim.lr_warmup_steps=1"
    assert cli.main(["draft", "--checkpoint", "run", *draft, *quick]) == 0
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_script(
        "bench_sd.sh",
        {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "RUN": "run"},
        *("--rounds", "1", "--candidates", "48", "--new-tokens", "8", "--no-selector"),
        *("--threads", "1", "--batch", "1", "--plan", "1_1_2", "4_4_16"),
    )
    rows = json.loads(Path("run/bench_sd.json").read_text())["rows"]
    assert {row["contender"] for row in rows} == {"off", "1_1_2", "4_4_16"}
    assert Path("run/bench_sd.png").stat().st_size > 10_000
