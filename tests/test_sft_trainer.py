"""Launch lines of VERL's SFT trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream import fsdp_sft_trainer, sft_trainer
from tests.run.helpers import metrics_of, save_tiny_model

PAIRS = [{"question": f"{i} + 1 =", "answer": f"{i + 1}"} for i in range(10)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)))
    return file


def settings(capsys: pytest.CaptureFixture[str], *line: str, module: Any = sft_trainer) -> Any:
    """Return the settings that a line leads to."""
    assert module.main([*line, "trainer.device=cpu", "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_keys_of_sft_become_ours(
    capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    found = settings(
        capsys,
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=64",
        "data.max_token_len_per_gpu=4096",
        "data.truncation=right",
        "data.multiturn.messages_key=turns",
        "data.pad_mode=no_padding",
        f"model.path={model}",
        "model.use_remove_padding=True",
        "model.lora_rank=4",
        "engine=fsdp",
        "engine.ulysses_sequence_parallel_size=2",
        "optim=fsdp",
        "optim.lr=2e-4",
        "optim.betas=[0.9,0.95]",
        "optim.lr_warmup_steps_ratio=0.2",
        "optim.clip_grad=0.5",
        "optim.lr_scheduler=cosine",
        "trainer.total_epochs=3",
        "trainer.project_name=p",
        "trainer.experiment_name=e",
        "trainer.save_freq=after_each_epoch",
        "trainer.test_freq=after_each_epoch",
        "trainer.max_ckpt_to_keep=2",
        "ulysses_sequence_parallel_size=4",
        "use_remove_padding=true",
    )
    sft = found["sft"]
    # 10 rows have two whole batches of 4 in an epoch.
    assert (sft["total_training_steps"], sft["save_freq"]) == (6, 2)
    assert (sft["train_batch_size"], sft["max_length"]) == (4, 64)
    assert (sft["max_tokens_per_micro_batch"], sft["truncation"]) == (4096, "right")
    assert (sft["messages_key"], sft["prompt_key"]) == ("turns", "question")
    assert sft["wrap_prompts"] is True
    assert (sft["optim"]["lr"], sft["optim"]["betas"]) == (2e-4, [0.9, 0.95])
    assert sft["optim"]["lr_warmup_steps_ratio"] == 0.2
    assert sft["optim"]["lr_scheduler_type"] == "cosine"
    assert found["actor_rollout_ref"]["actor"]["grad_clip"] == 0.5
    assert found["actor_rollout_ref"]["model"]["path"] == str(model)
    assert found["actor_rollout_ref"]["model"]["lora_rank"] == 4
    assert found["trainer"]["max_actor_ckpt_to_keep"] == 2
    assert found["trainer"]["default_local_dir"] == "checkpoints/p/e"
    assert found["trainer"]["mode"] == "sft"


def test_entries_of_columns_are_read(
    capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    found = settings(
        capsys,
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        f"model.partial_pretrain={model}",
        "trainer.total_training_steps=5",
        module=fsdp_sft_trainer,
    )
    assert found["sft"]["prompt_key"] == "extra_info.question"
    assert found["sft"]["response_key"] == "extra_info.answer"
    assert found["sft"]["total_training_steps"] == 5


def test_all_problems_of_a_line_are_in_one_error(
    capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    line = [
        f"data.train_files={rows}",
        "data.train_batch_size=11",
        "data.custom_cls.path=mine.py",
        "data.train_file=x",
        f"model.path={model}",
        "optim.lr=fast",
    ]
    assert sft_trainer.main([*line, "--cfg", "job"]) == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert error.startswith("4 settings")
    for part in (
        "data.train_batch_size=11 ",
        "data.custom_cls.path=",
        "data.train_file: ",
        "optim.lr",
    ):
        assert part in error, part


def test_a_file_that_starts_from_verls_is_composed(
    capsys: pytest.CaptureFixture[str], rows: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [sft_trainer, _self_]\n"
        f"data: {{train_files: {rows}, train_batch_size: 5}}\nmodel: {{path: {model}}}\n"
    )
    found = settings(capsys, "--config-path", str(tmp_path), "--config-name", "mine")
    assert found["sft"]["total_training_steps"] == 2 * 4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("data.prompt_key=7 data.prompt_dict_keys=[a]", "sft.prompt_key: expected a string"),
        ("data.train_files=[]", "data.train_files is not set; set data.train_files=FILE"),
        ("data.train_max_samples=true", "sft.train_max_samples: expected an integer"),
        ("trainer.rollout_data_dir=out", "trainer.rollout_data_dir: VERL's SFT has no such option"),
        ("~data.task", "data.task: VERL's SFT has no such option"),
        ("trainer.total_epoch=1", "did you mean trainer.total_epochs?"),
    ],
)
def test_a_wrong_setting_is_one_problem(
    overrides: str, problem: str, capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    line = [f"data.train_files={rows}", "data.train_batch_size=5", f"model.path={model}"]
    assert sft_trainer.main([*line, *overrides.split(), "--cfg", "job"]) == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert problem in error
    assert "settings cannot be used" not in error


def test_a_file_without_rows_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    (tmp_path / "none.json").write_text("[]")
    line = [f"data.train_files={tmp_path / 'none.json'}", f"model.path={model}", "--cfg", "job"]
    assert sft_trainer.main(line) == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert error.startswith("data.train_files has no rows; set data.train_files=FILE")


@pytest.mark.parametrize(
    ("in_file", "on_line", "steps"), [("after_each_epoch", "3", 3), ("3", "after_each_epoch", 2)]
)
def test_the_last_save_freq_counts(
    in_file: str,
    on_line: str,
    steps: int,
    capsys: pytest.CaptureFixture[str],
    rows: Path,
    model: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(f"trainer: {{save_freq: {in_file}}}\n")
    found = settings(
        capsys,
        *("--config", str(tmp_path / "mine.yaml"), f"trainer.save_freq={on_line}"),
        *(f"data.train_files={rows}", "data.train_batch_size=5", f"model.path={model}"),
    )
    assert found["sft"]["save_freq"] == steps


def test_deleted_keys_get_their_defaults(
    capsys: pytest.CaptureFixture[str], rows: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"data: {{train_files: {rows}, train_batch_size: 5, truncation: left, max_length: 64}}\n"
        f"model: {{path: {model}}}\noptim: {{lr: 0.5, betas: [0.1, 0.2]}}\n"
        "trainer: {total_epochs: 1}\n"
    )
    deleted = ("~data.truncation", "~data.max_length", "~optim", "~trainer.total_epochs")
    line = ("--config", str(tmp_path / "mine.yaml"), *deleted, "~data.multiturn", "~engine")
    sft = settings(capsys, *line)["sft"]
    assert (sft["truncation"], sft["max_length"]) == ("error", 1024)
    assert (sft["optim"]["lr"], sft["optim"]["betas"]) == (1e-5, [0.9, 0.999])
    assert sft["total_training_steps"] == 2 * 4
    assert settings(capsys, *line, "data.truncation=right")["sft"]["truncation"] == "right"


@pytest.mark.parametrize("key", ["data.nothing", "optim.nothing", "nothing"])
def test_deleting_an_unknown_key_is_an_error(
    key: str, capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    line = [f"data.train_files={rows}", "data.train_batch_size=5", f"model.path={model}"]
    assert sft_trainer.main([*line, f"~{key}", "--cfg", "job"]) == 2
    assert f"error: {key}: " in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["data.train_batch_size=null", "trainer.total_epochs=0"])
def test_settings_that_leave_the_number_of_steps_open_are_errors(
    setting: str, capsys: pytest.CaptureFixture[str], rows: Path, model: Path
) -> None:
    line = [f"data.train_files={rows}", "data.train_batch_size=5", f"model.path={model}"]
    assert sft_trainer.main([*line, setting, "--cfg", "job"]) == 2
    assert f"error: {setting}: set it to" in capsys.readouterr().err


def test_under_torchrun_the_first_process_starts_the_others(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: Path,
    model: Path,
) -> None:
    line = (f"data.train_files={rows}", "data.train_batch_size=4", f"model.path={model}")
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert sft_trainer.main(["no such argument"]) == 0
    monkeypatch.setenv("RANK", "0")
    found = settings(capsys, *line)
    assert (found["trainer"]["nnodes"], found["trainer"]["n_gpus_per_node"]) == (1, 3)


def test_a_rank_without_torchrun_is_ignored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: Path, model: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    line = (f"data.train_files={rows}", "data.train_batch_size=5", f"model.path={model}")
    assert settings(capsys, *line)["sft"]["total_training_steps"] == 2 * 4


def test_torchrun_on_several_machines_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: Path, model: Path
) -> None:
    for name, value in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    line = [f"data.train_files={rows}", "data.train_batch_size=4", f"model.path={model}"]
    assert sft_trainer.main([*line, "trainer.device=cpu"]) == 2
    assert "trainer.nnodes=2 trainer.n_gpus_per_node=2" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "x"), ("LOCAL_WORLD_SIZE", "0")])
def test_odd_variables_of_torchrun_are_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: Path,
    model: Path,
    name: str,
    value: str,
) -> None:
    for other, number in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(other, number)
    monkeypatch.setenv(name, value)
    line = [f"data.train_files={rows}", "data.train_batch_size=4", f"model.path={model}"]
    assert sft_trainer.main([*line, "trainer.device=cpu"]) == 2
    assert f"{name}={value}" in (error := capsys.readouterr().err)
    assert "torchrun" in error


def test_a_line_trains(rows: Path, model: Path, tmp_path: Path) -> None:
    line = [
        f"data.train_files={rows}",
        "data.train_batch_size=5",
        "data.max_length=64",
        f"model.path={model}",
        "trainer.total_epochs=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    assert sft_trainer.main(line) == 0
    found = metrics_of(tmp_path / "run" / "sft")
    assert sorted(found) == [1, 2]
    # Each of the ten answers is one token, and an end-of-turn token follows.
    assert sum(metrics["sft/tokens"] for metrics in found.values()) == 2 * len(PAIRS)
