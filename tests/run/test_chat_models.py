"""Runs on models with chat templates: end tokens, dates, special tokens."""

from __future__ import annotations

import datetime
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
from slipstream.errors import CheckpointError
from tests.data.helpers import STYLES, byte_tokenizer
from tests.run.helpers import assert_same_result, records_of, result_of, rl_only, tiny

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


def test_a_run_that_resumes_on_another_day_keeps_the_date_of_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(["<|end|>"], STYLES["dated"], eos_token="<|end|>")
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    rows = [{"prompt": chat(f"say {c}"), "data_source": "x"} for c in "ab"]
    files = write_rows(tmp_path / "rl.jsonl", rows)
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str, **_): return float(len(solution_str) % 2)\n")

    def run(folder: str, steps: int, day: int, *overrides: str) -> Path:
        monkeypatch.setattr(
            "slipstream.run.context.today", lambda: datetime.date(2026, 1, day), raising=True
        )
        line = rl_only(
            tmp_path / folder,
            "data.task=null",
            f"data.tokenizer={tmp_path / 'tokenizer'}",
            f"data.train_files={files}",
            "data.max_prompt_length=64",
            "data.max_response_length=4",
            f"trainer.total_training_steps={steps}",
            *overrides,
            reward=reward,
        )
        assert main(line) == 0
        return tmp_path / folder

    whole = run("whole", 2, 30)
    run("parts", 1, 30)
    parts = run("parts", 2, 31)
    assert_same_result(result_of(parts), result_of(whole))
    inputs = {row["input"] for rows in records_of(parts / "rollouts").values() for row in rows}
    assert len(inputs) == 2
    assert all(text.startswith("Today: 30 Jan 2026 00:00.") for text in inputs)
    assert load_config(file=parts / "config.yaml").data.chat_template_date == "2026-01-30"
    resumed = "trainer.resume_mode=resume_path"
    path = f"trainer.resume_from_path={parts / 'global_step_2'}"
    other = run("other", 3, 31, resumed, path)
    assert records_of(other / "rollouts")["3.jsonl"][0]["input"] in inputs
    again = run("parts", 1, 31, "trainer.resume_mode=disable")
    inputs = {row["input"] for rows in records_of(again / "rollouts").values() for row in rows}
    assert all(text.startswith("Today: 31 Jan 2026 00:00.") for text in inputs)


def test_a_template_that_ignores_the_question_is_refused_before_the_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rl.jsonl", [{"prompt": chat("say a"), "data_source": "x"}])
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    line = rl_only(
        tmp_path / "run",
        "data.task=null",
        f"data.tokenizer={base}",
        f"data.train_files={rows}",
        f"data.chat_template={template}",
    )
    assert main(line) == 3
    error = capsys.readouterr().err
    assert "user message" in error
    assert "actor_rollout_ref.model.custom_chat_template" in error


def test_tags_that_are_special_tokens_reach_the_reward_and_the_record(tmp_path: Path) -> None:
    tags = ["<answer>", "</answer>"]
    tokenizer = byte_tokenizer([*CHATML, *tags], STYLES["chatml"], eos_token=CHATML[2])
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    rows = write_rows(tmp_path / "rl.jsonl", [{"prompt": chat("say a"), "data_source": "x"}] * 8)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(solution_str, **_):\n"
        "    return {'score': float(len(solution_str)), 'tags': solution_str.count('answer>')}\n"
    )

    def run(folder: str, *overrides: str) -> list[dict[str, Any]]:
        line = rl_only(
            tmp_path / folder,
            "data.task=null",
            f"data.tokenizer={tmp_path / 'tokenizer'}",
            f"data.train_files={rows}",
            "data.max_prompt_length=64",
            "data.train_batch_size=8",
            "data.max_response_length=64",
            "trainer.total_training_steps=1",
            *overrides,
            reward=reward,
        )
        assert main(line) == 0
        return records_of(tmp_path / folder / "rollouts")["1.jsonl"]

    special = [258, 259, 260, 256, 257]
    kept, skipped = run("kept"), run("skipped", "reward_model.skip_special_tokens=true")
    assert [row["response_ids"] for row in kept] == [row["response_ids"] for row in skipped]
    assert sum(set(row["response_ids"][:-1]) & {259, 260} != set() for row in kept) > 0
    for full, bare in zip(kept, skipped, strict=True):
        ids = full["response_ids"]
        ended = ids[-1] == 258
        assert full["text"] == tokenizer.decode(ids[:-1] if ended else ids)
        assert bare["text"] == tokenizer.decode([i for i in ids if i not in special])
        assert [full["score"], bare["score"]] == [len(full["text"]), len(bare["text"])]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_the_new_size(
    tuned: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(huggingface_folder(tuned / "sft/global_step_1"), model)
    tokenizer = load_tokenizer(model)
    width = json.loads((model / "config.json").read_text())["vocab_size"]
    config = load_config(
        [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.init=null"],
        recipe="tiny",
    )
    spare = [f"<spare-{i}>" for i in range(width - len(tokenizer))]
    tokenizer.add_tokens(spare)
    assert model_config(config, tokenizer, model).vocab_size == len(tokenizer) == width
    tokenizer.add_tokens(["<more>"])
    for check in (model_config, make_policy):
        with pytest.raises(
            CheckpointError, match=rf"'<more>'.*resize_token_embeddings\({width + 1}, "
        ):
            check(config, tokenizer, model)
    tokenizer.image_token = "<more>"
    model_config(config, tokenizer, model)
