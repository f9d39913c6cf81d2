"""Runs on models with chat templates: end tokens, dates, special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from slipstream.build.policy import make_policy, model_config
from slipstream.checkpoint.state import huggingface_folder
from slipstream.cli import main
from slipstream.config.load import load_config
from slipstream.data.tokenizer import load_tokenizer
from tests.data.helpers import STYLES, byte_tokenizer
from tests.run.helpers import tiny

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS, END = 256, 258


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(content: str, answer: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": content}]
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of a base model: its template ends turns with another token."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer(CHATML, STYLES["chatml"], eos_token=CHATML[0], pad_token=CHATML[0])
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one step of SFT of a base model."""
    root = tmp_path_factory.mktemp("tuned")
    rows = write_rows(root / "sft.jsonl", [{"messages": chat("say a", "a")}])
    overrides = (
        "data.task=null",
        f"data.tokenizer={base}",
        f"sft.train_files={rows}",
        "sft.total_training_steps=1",
        "sft.test_freq=-1",
    )
    line = [argument for argument in tiny(root / "run", *overrides) if argument != "train"]
    assert main(["sft", *line]) == 0
    return root / "run"


def ends_in(folder: Path) -> list[int]:
    ends = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    return ends if isinstance(ends, list) else [ends]


def test_the_templates_end_of_a_turn_is_an_end_token_of_checkpoints(tuned: Path) -> None:
    assert ends_in(huggingface_folder(tuned / "sft/global_step_1")) == [EOS, END]


def test_an_older_checkpoint_gets_the_end_token_when_it_is_loaded_or_exported(
    tuned: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(huggingface_folder(tuned / "sft/global_step_1"), old)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((old / name).read_text())
        (old / name).write_text(json.dumps({**values, "eos_token_id": EOS}))
    model = "actor_rollout_ref.model"
    config = load_config([f"{model}.path={old}", f"{model}.init=null"], recipe="tiny")
    tokenizer = load_tokenizer(old)
    assert model_config(config, tokenizer, old).eos_token_ids == (EOS, END)
    assert make_policy(config, tokenizer, old).config.eos_token_ids == (EOS, END)
    assert main(["export", "--checkpoint", str(old), "--output", str(tmp_path / "new")]) == 0
    assert ends_in(tmp_path / "new") == [EOS, END]
