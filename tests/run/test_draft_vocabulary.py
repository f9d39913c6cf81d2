"""Co-training of an EAGLE head with a draft vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slipstream.checkpoint.state import draft_folder
from slipstream.cli import main
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.names import check_names
from slipstream.models.draft.files import load_draft_head
from tests.run.helpers import (
    assert_same_result,
    assert_same_rl,
    result_of,
    rl_only,
    write_reward,
)
from tests.run.test_cotraining import LEARN, OPPORTUNISTIC, SETTINGS

VOCABULARY = "speculative.eagle.draft_vocab_size=16"


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run, and its reward function."""
    root = tmp_path_factory.mktemp("learned")
    reward = write_reward(root)
    assert main(rl_only(root / "run", *SETTINGS, *LEARN, VOCABULARY, reward=reward)) == 0
    return root / "run", reward


def test_the_vocabulary_is_renewed_and_changes_no_rollout(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    assert main(rl_only(tmp_path / "off", *SETTINGS, reward=reward)) == 0
    assert_same_rl(folder, tmp_path / "off")
    steps = dict(read_jsonl(folder / "metrics.jsonl"))
    for metrics in steps.values():
        check_names(metrics)
    # A new head of RL drafts the lowest token ids until co-training has counted tokens.
    before, after = (steps[2][f"drafter/vocabulary_coverage{name}"] for name in ("/before", ""))
    # The policy's weights are random, so it writes all tokens about equally often.
    assert after > 1.2 * before
    head = load_draft_head(draft_folder(folder / "global_step_4"))
    assert head.draft_vocab_size == 16
    assert head.tokens != tuple(range(16))


def test_a_resumed_run_has_the_same_vocabulary(learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, reward = learned
    again = tmp_path / "run"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "global_step_4")
    (again / "latest_checkpointed_iteration.txt").write_text("2")
    assert main(rl_only(again, *SETTINGS, *LEARN, VOCABULARY, reward=reward)) == 0
    assert_same_result(result_of(folder), result_of(again))
    ours, theirs = (load_draft_head(draft_folder(f / "global_step_4")) for f in (folder, again))
    assert ours.tokens == theirs.tokens


def test_the_training_process_publishes_its_vocabulary(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    settings = (*SETTINGS, *LEARN, VOCABULARY, OPPORTUNISTIC)
    assert main(rl_only(tmp_path / "run", *settings, reward=reward)) == 0
    assert_same_rl(folder, tmp_path / "run")
    head = load_draft_head(draft_folder(tmp_path / "run" / "global_step_4"))
    assert head.draft_vocab_size == 16


def test_a_new_head_lowers_the_size_of_its_vocabulary(
    learned: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "build.speculation.LARGE": 16,
        "build.speculation.SIZE_WITHOUT_RESPONSES": 24,
        "drafter.cotraining.best_size": lambda *_: 8,
        "drafter.cotraining._FEWEST_RESPONSES": 1,
    }.items():
        monkeypatch.setattr(f"slipstream.{name}", value)
    folder, reward = learned
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, reward=reward)
    assert main(line) == 0
    assert_same_rl(folder, tmp_path / "run")
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert steps[4]["drafter/vocabulary_tokens"] == 8
    head = load_draft_head(draft_folder(tmp_path / "run" / "global_step_4"))
    assert head.draft_vocab_size == 8
    # A resumed run starts with 24 tokens, and gets the others from the checkpoint.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(again / "global_step_4")
    (again / "latest_checkpointed_iteration.txt").write_text("2")
    assert load_draft_head(draft_folder(again / "global_step_2")).draft_vocab_size == 8
    assert main(rl_only(again, *SETTINGS, *LEARN, reward=reward)) == 0
    assert_same_result(result_of(tmp_path / "run"), result_of(again))
    assert load_draft_head(draft_folder(again / "global_step_4")).draft_vocab_size == 8


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_vocabulary_of_impossible_size_is_refused(
    tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = f"speculative.eagle.draft_vocab_size={size}"
    assert (
        main(rl_only(tmp_path / "run", *SETTINGS, *LEARN, wrong, reward=write_reward(tmp_path)))
        == 2
    )
    assert "speculative.eagle.draft_vocab_size" in capsys.readouterr().err


def test_the_dry_run_counts_a_head_with_a_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, reward=write_reward(tmp_path))
    assert main([*line, VOCABULARY, "--dry-run"]) == 0
    assert "draft head" in capsys.readouterr().out
