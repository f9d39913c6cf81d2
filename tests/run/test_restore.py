"""Checkpoints with a value that no run writes are refused: file, entry, value and remedy.

Each checkpoint is complete, and its manifest fits. `tests/fuzz/checkpoints.py` tries many more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.errors import CheckpointError, DataError
from tests.fuzz.checkpoints import CASES, STEP, Case, seal

STEP_FOLDER = f"global_step_{STEP}"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("cases")
    return {kind: make(root / kind) for kind, make in CASES.items()}


def refusal(case: Case, root: Path, change: Callable[[Path], None]) -> str:
    """The error of a copy of the checkpoint that `change` has changed."""
    shutil.copytree(case.root, root / "run")
    folder = root / "run" / STEP_FOLDER
    change(folder)
    seal(folder)
    resolved = CheckpointManager(root / "run", keep=None).resolve("auto", None)
    assert resolved == folder
    with pytest.raises((CheckpointError, DataError)) as caught:
        case.restore(folder)
    case.restore(case.root / STEP_FOLDER)
    return str(caught.value)


def at(value: Any, *path: str | int) -> Any:
    for key in path:
        value = value[key]
    return value


def in_json(name: str, *path: str | int, value: Any = "REMOVE") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        inner = at(content, *path[:-1])
        if value == "REMOVE":
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        (folder / name).write_text(json.dumps(content))

    return change


def in_tree(name: str, *path: str | int, value: Any = "REMOVE") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = load_tree(folder / name)
        inner = at(tree, *path[:-1])
        if isinstance(value, str) and value == "REMOVE":
            del inner[path[-1]]
        else:
            inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
        save_tree(folder / name, tree)

    return change


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


OPTIMIZER, PUBLISHED = "actor/optimizer.safetensors", "actor/published.safetensors"
COTRAINING = "draft/cotraining.safetensors"
NORM = ("optimizer", "adamw", "model.norm.weight")


@pytest.mark.parametrize(
    ("kind", "change", "texts"),
    [
        ("list", in_json("state.json", "threads", value=-5), ("state.json", "threads is -5")),
        ("list", in_json("state.json", "step", value=3), ("state.json", "step is 3")),
        ("list", in_json("state.json", "policy_version", value=1), (OPTIMIZER, "policy_version")),
        ("list", in_json("state.json", "versions", value={"torch": 5}), ("versions.torch is 5",)),
        ("list", in_json("state.json", "config"), ("state.json", "lacks config")),
        ("list", in_json("data.json", "kl_in_reward"), ("data.json", "'kl_in_reward' is missing")),
        (
            "list",
            in_json("data.json", "kl_in_reward", "kl_coef", value=float("nan")),
            ("data.json", "kl_in_reward.kl_coef is NaN"),
        ),
        (
            "list",
            in_json("data.json", "data_buffer", "epoch_id", value=10**12),
            ("data.json", "data_buffer is at prompt 7000000000004", "next_group is 4"),
        ),
        (
            "list",
            in_json("data.json", "data_buffer", "sample_offset", value=-1),
            ("data.json", "data_buffer", "sample_offset is -1"),
        ),
        (
            "list",
            in_json("data.json", "rollouts", "next_group", value="many"),
            ("data.json", "rollouts", "next_group is 'many'"),
        ),
        (
            "list",
            in_json("data.json", "rollouts", "carried", 0, "index", value=4),
            ("data.json", "carried[0].index is 4"),
        ),
        (
            "list",
            in_json(
                "data.json", *("rollouts", "carried", 0, "samples", 0, "segments", 1),
                *("spans", 0, "version"), value=10**12,
            ),
            ("data.json", "version of spans is 1000000000000"),
        ),
        (
            "mixture",
            in_json("data.json", "data_buffer", "sources", 1, "index", value=2**40),
            ("data.json", "data_buffer", "drawn is 4, but the sources are at"),
        ),
        (
            "dataset",
            in_json("data.json", "data_buffer", "epoch_id", value=10**12),
            ("data.json", "epoch_id=1000000000000"),
        ),
        (
            "dataset",
            in_json("data.json", "data_buffer", "sampler_state", "rates", 0, value=1.5),
            ("data.json", "sampler_state", "rates[0] is 1.5"),
        ),
        (
            "dataset",
            in_json("data.json", "data_buffer", "sampler_state", value=None),
            ("data.json", "sampler_state is None, not a state of PassRateSampler"),
        ),
        (
            "sft",
            in_json("data.json", "stream", "streams", 0, "epoch", value=10**12),
            ("data.json", "stream", "drawn is 8"),
        ),
        ("list", in_tree(OPTIMIZER, *NORM, "step", value=nan), (OPTIMIZER, "step has NaN")),
        (
            "list",
            in_tree(OPTIMIZER, *NORM, "step", value=torch.tensor(1e9)),
            (OPTIMIZER, "adamw.model.norm.weight.step is 1e+09"),
        ),
        (
            "list",
            in_tree(OPTIMIZER, *NORM, "step", value=torch.tensor(7.0)),
            (OPTIMIZER, "up to 7, but 2 updates"),
        ),
        (
            "list",
            in_tree(OPTIMIZER, *NORM, "exp_avg", value=torch.zeros(3)),
            (OPTIMIZER, "exp_avg is a tensor float32 (3,)"),
        ),
        (
            "list",
            in_tree(OPTIMIZER, *NORM, "exp_avg_sq", value=lambda moment: moment - 1),
            (OPTIMIZER, "exp_avg_sq has negative values"),
        ),
        ("list", in_tree(OPTIMIZER, *NORM, "exp_avg"), (OPTIMIZER, "exp_avg' is missing")),
        ("list", in_tree(OPTIMIZER, "optimizer", "adamw", value={}), (OPTIMIZER, "up to 0, but 2")),
        ("list", in_tree(OPTIMIZER, "counts", "updates", value=9), (OPTIMIZER, "updates=9")),
        ("list", in_tree(OPTIMIZER, "counts"), (OPTIMIZER, "'counts' is missing")),
        ("mixture", in_tree(OPTIMIZER, "optimizer", "muon", value={}), (OPTIMIZER, "no momentum")),
        ("dataset", in_tree(OPTIMIZER, "lora", "rank", value="2"), (OPTIMIZER, "lora.rank is '2'")),
        ("critic", in_tree("critic/optimizer.safetensors", *("optimizer", "adamw"), "score.weight"),
         ("critic/optimizer.safetensors", "'score.weight'")),
        ("list", in_tree(PUBLISHED, "version", value=3), (PUBLISHED, "version is 3")),
        (
            "list",
            in_tree(PUBLISHED, "tensors", "model.norm.weight", value=nan),
            (PUBLISHED, "tensors.model.norm.weight has NaN"),
        ),
        ("cotraining", in_tree(COTRAINING, "trained_to", value=7), (COTRAINING, "trained_to is 7")),
        (
            "cotraining",
            in_tree(COTRAINING, "collector", "buffer", "kept", 0, "step", value=10**12),
            (COTRAINING, "step of a response is 1000000000000"),
        ),
        (
            "cotraining",
            in_tree(COTRAINING, "collector", "buffer", "kept", 0, "tokens", 0, value=10**6),
            (COTRAINING, "collector", "token ids from"),
        ),
        (
            "cotraining",
            in_tree(COTRAINING, "average", "n_averaged", value=torch.tensor(-1)),
            (COTRAINING, "averaged weights is -1"),
        ),
        ("draft", in_tree(OPTIMIZER, "step", value=10**12), (OPTIMIZER, "1000000000000")),
        (
            "draft",
            in_json("data.json", "source", "prompts", "epoch_id", value=10**12),
            ("data.json", "source", "prompts drawn is"),
        ),
        ("list", lambda folder: (folder / PUBLISHED).unlink(), (PUBLISHED, "is missing")),
        ("cotraining", lambda folder: (folder / COTRAINING).unlink(), (COTRAINING, "is missing")),
    ],
)  # fmt: skip
def test_a_value_that_no_run_writes_is_refused(
    cases: dict[str, Case],
    tmp_path: Path,
    kind: str,
    change: Callable[[Path], None],
    texts: tuple[str, ...],
) -> None:
    message = refusal(cases[kind], tmp_path, change)
    for text in texts:
        assert text in message
    assert "resume from another checkpoint" in message or "another model" in message
    assert len(message) < 700


def test_files_of_a_state_must_be_in_the_manifest(cases: dict[str, Case], tmp_path: Path) -> None:
    shutil.copytree(cases["list"].root, tmp_path / "run")
    folder = tmp_path / "run" / STEP_FOLDER
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["actor/optimizer.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "note.txt").write_text("added later")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is not in m") as caught:
        CheckpointManager(tmp_path / "run", keep=None).resolve("auto", None)
    assert "note.txt" not in str(caught.value)
