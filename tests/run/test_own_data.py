"""Data sets, samplers and generators of a user's own, through whole runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from tests.run.helpers import assert_same_result, metrics_of, records_of, result_of, rl_only

CODE = """
import torch
from slipstream.data.rlhf_dataset import RLHFDataset

class Sums(RLHFDataset):
    def __init__(self, data_files, tokenizer, processor, config, max_samples, size):
        self.dataframe = list(range(size))
        super().__init__(None, tokenizer, config, processor, max_samples)

    def __getitem__(self, index):
        text = f"1 + {index} ="
        return {**self.tokenizer(text), "prompt": text, "state": index, "data_source": "sums",
                "vector": torch.tensor([index, 1])}

class Grow:
    def __init__(self, config): pass
    def generate(self, dataset):
        batch = dataset.last_batch
        if batch is None:
            return []
        return [{"prompt": f"{len(dataset)} + {len(batch)} ="}]

class Short: pass

def reward(data):
    states = data.batch["state"]
    assert data.batch["vector"][:, 0].tolist() == list(states)
    words = [len(set(text.split())) for text in data.non_tensor_batch["response_text"]]
    return torch.tensor([float((s + w) % 3) for s, w in zip(states, words)])
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE, encoding="utf-8")
    save_tokenizer(build_tokenizer(), tmp_path / "tokenizer")
    return path


def line(folder: Path, code: Path, *overrides: str) -> list[str]:
    return rl_only(
        folder,
        "data.task=null",
        f"data.tokenizer={code.parent / 'tokenizer'}",
        *overrides,
    )


def own(folder: Path, code: Path, *overrides: str) -> list[str]:
    return line(
        folder,
        code,
        f"data.custom_cls.path={code}",
        "data.custom_cls.name=Sums",
        "data.custom_cls.kwargs.size=5",
        "data.sampler.class_name=PassRateSampler",
        f"custom_reward_function.path={code}",
        "custom_reward_function.name=reward",
        *overrides,
    )


def test_custom_dataset_with_curriculum_and_field_reward_resumes_exactly(
    tmp_path: Path, code: Path
) -> None:
    assert main(own(tmp_path / "whole", code, "trainer.total_training_steps=4")) == 0
    rows = [row for rows in records_of(tmp_path / "whole" / "rollouts").values() for row in rows]
    assert {row["uid"].split(":")[0] for row in rows} == {"Sums"}
    for row in rows:
        state, words = row["extra_info"]["state"], len(set(row["text"].split()))
        assert row["score"] == float((state + words) % 3)
        assert row["input"] == f"1 + {state} ="
    for steps in (2, 4):
        part = own(tmp_path / "parts", code, f"trainer.total_training_steps={steps}")
        assert main(part) == 0
    assert_same_result(result_of(tmp_path / "parts"), result_of(tmp_path / "whole"))


def test_total_epochs_of_a_custom_dataset_set_the_number_of_steps(
    tmp_path: Path, code: Path
) -> None:
    epochs = ("trainer.total_training_steps=null", "trainer.total_epochs=2")
    assert main(own(tmp_path / "run", code, *epochs)) == 0
    assert sorted(metrics_of(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_generated_rows_are_used_and_restored_by_a_resume(tmp_path: Path, code: Path) -> None:
    files = tmp_path / "rows.jsonl"
    files.write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(2)))

    def run(folder: str, steps: int) -> Path:
        overrides = (
            f"data.train_files={files}",
            f"data.datagen.path={code}",
            "data.datagen.name=Grow",
            f"trainer.total_training_steps={steps}",
            "custom_reward_function.path=" + str(tmp_path / "reward.py"),
        )
        assert main(line(tmp_path / folder, code, *overrides)) == 0
        return tmp_path / folder

    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 2)\n"
    )
    whole = run("whole", 5)
    inputs = [row["input"] for rows in records_of(whole / "rollouts").values() for row in rows]
    assert "2 + 4 =" in inputs
    run("parts", 3)
    assert_same_result(result_of(run("parts", 5)), result_of(whole))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.custom_cls.name=Sum",), "'Sum' is not in"),
        (("data.custom_cls.name=Short",), "must be a class with __getitem__ and __len__"),
        (("data.custom_cls.kwargs.sizes=3",), "cannot be created with data_files, tokenizer"),
        (("data.custom_cls.kwargs.config=3",), "must not contain config"),
        (("data.custom_cls.path=absent.py",), "is not a file: give the path of a Python file"),
        (("data.custom_cls.kwargs.size=0",), "Sums has no rows: give it data files"),
        (("data.sampler.class_name=PassRate",), "did you mean PassRateSampler"),
        (("data.sampler.kwargs.flor=1",), "did you mean floor"),
        (("data.task=countdown",), "; set data.task=null"),
        (("data.datagen.path=x.py",), "set both, or neither"),
        (("data.mixture_weights=[1]", "data.train_files=x"), "set data.mixture_weights=null"),
    ],
)
def test_invalid_custom_classes_are_refused_before_training(
    tmp_path: Path,
    code: Path,
    overrides: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(own(tmp_path / "run", code, *overrides)) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_filtered_groups_update_the_curriculum(tmp_path: Path, code: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['state'] < 3:\n"
        "        return 1.0\n"
        "    return float(len(set(solution_str.split())) % 2)\n"
    )
    line = own(
        tmp_path / "run",
        code,
        "data.custom_cls.kwargs.size=6",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "actor_rollout_ref.rollout.n=6",
        "trainer.total_training_steps=4",
        f"custom_reward_function.path={tmp_path / 'judge.py'}",
        "custom_reward_function.name=compute_score",
    )
    assert main(line) == 0
    data = json.loads((tmp_path / "run/global_step_4/data.json").read_text())["data_buffer"]
    rates = data["sampler_state"]["rates"]
    # Those that are always right were never trained on, and are known to be.
    assert min(rates[:3]) > 0.7
    trained = {
        row["extra_info"]["state"]
        for rows in records_of(tmp_path / "run" / "rollouts").values()
        for row in rows
    }
    assert trained <= {3, 4, 5}


BROKEN = """
from slipstream.data.rlhf_dataset import RLHFDataset

class Late(RLHFDataset):
    def __init__(self, data_files, tokenizer, processor, config, max_samples):
        self.asked = 0
        self.dataframe = list(range(9))
        super().__init__(None, tokenizer, config, processor, max_samples)

    def __getitem__(self, index):
        self.asked += 1
        if self.asked > 3:
            raise KeyError("gone")
        return self.tokenizer(f"1 + {index} =")

def one(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)
"""


def test_error_of_a_custom_dataset_is_one_line(
    tmp_path: Path, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code.write_text(CODE + BROKEN)
    line = own(
        tmp_path / "run",
        code,
        "data.custom_cls.name=Late",
        "~data.custom_cls.kwargs.size",
        "custom_reward_function.name=one",
    )
    assert main(line) == 3
    error = capsys.readouterr().err
    assert "error: Late.__getitem__(" in error
    assert "failed with KeyError: 'gone'" in error
    assert "Traceback" not in error


def test_overlong_items_are_filtered_from_validation(tmp_path: Path, code: Path) -> None:
    long = (
        "\nclass Long(Sums):\n"
        "    def __getitem__(self, index):\n"
        "        item = super().__getitem__(index)\n"
        "        return item if index % 2 else {**item, **self.tokenizer('1 ' * 99)}\n"
    )
    code.write_text(CODE + long)
    line = own(
        tmp_path / "run",
        code,
        "data.custom_cls.name=Long",
        "data.val_files=none.jsonl",
        "data.filter_overlong_prompts=true",
        "trainer.total_training_steps=1",
    )
    assert main(line) == 0
    rows = records_of(tmp_path / "run" / "validation")["1.jsonl"]
    assert [row["extra_info"]["state"] for row in rows] == [1, 3]
