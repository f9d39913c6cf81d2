"""Resuming: which checkpoint a run continues from, and which folders it refuses."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.manager import MANIFEST, TRACKER
from slipstream.cli import main
from slipstream.kernels import processor
from tests.run.helpers import (
    ACTOR,
    assert_same_result,
    metrics_of,
    policy,
    records_of,
    result_of,
    rl_only,
    steps_of,
    tiny,
    write_reward,
)

SETTINGS = (
    "sft.total_training_steps=2",
    "sft.save_freq=1",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    # The engines of a run resumed at step 3 have the weights of step 2.
    "trainer.sync_every=2",
    "data.val_size=2",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a complete run and its reward function; tests use copies of the folder."""
    root = tmp_path_factory.mktemp("finished")
    reward = write_reward(root)
    assert main(tiny(root / "run", *SETTINGS, reward=reward)) == 0
    return root / "run", reward


@pytest.fixture
def copy(finished: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def again(folder: Path, finished: tuple[Path, Path], *overrides: str) -> int:
    return main(tiny(folder, *SETTINGS, *overrides, reward=finished[1]))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    return error


def test_finished_run_is_not_repeated(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = result_of(copy)
    assert again(copy, finished) == 0
    assert_same_result(result_of(copy), before)
    assert "RL has already done all 3 steps" in capsys.readouterr().out


def test_only_the_last_two_checkpoints_are_kept(finished: tuple[Path, Path]) -> None:
    assert steps_of(finished[0]) == [2, 3]
    assert (finished[0] / TRACKER).read_text() == "3"
    assert steps_of(finished[0] / "sft") == [1, 2]


def test_run_extended_by_a_step_equals_a_longer_run(
    copy: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    assert again(copy, finished, "trainer.total_training_steps=4") == 0
    assert again(tmp_path / "whole", finished, "trainer.total_training_steps=4") == 0
    one, other = result_of(copy), result_of(tmp_path / "whole")
    # Step 3 was the last one of the shorter run, which therefore validated after it.
    for result in (one, other):
        for name in list(result["rl metrics"][3]):
            if name.startswith("val-"):
                del result["rl metrics"][3][name]
        result["validation"].pop("3.jsonl", None)
    assert_same_result(one, other)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_resume_path_repeats_the_steps_after_that_checkpoint(
    copy: Path, finished: tuple[Path, Path], tmp_path: Path, elsewhere: bool
) -> None:
    before = result_of(copy)
    target = tmp_path / "other" if elsewhere else copy
    path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={copy}/global_step_2"]
    assert again(target, finished, *path) == 0
    after = result_of(target)
    for name in ("rl actor/huggingface/model.safetensors", "rl actor/optimizer.safetensors"):
        assert after[name] == before[name]
    assert after["rl metrics"][3] == before["rl metrics"][3]
    assert sorted(after["rl metrics"]) == ([3] if elsewhere else [0, 1, 2, 3])
    assert not elsewhere or not (target / "sft").exists()


def test_resume_path_to_an_sft_checkpoint_repeats_sft_and_rl(
    copy: Path, finished: tuple[Path, Path]
) -> None:
    before = result_of(copy)
    step = f"trainer.resume_from_path={copy}/sft/global_step_1"
    assert again(copy, finished, "trainer.resume_mode=resume_path", step) == 0
    after = result_of(copy)
    for name in before:
        if name not in ("rollouts", "validation"):
            assert after[name] == before[name], name
    assert (copy / "metrics.1.jsonl").exists(), "the record of the RL before is kept"


@pytest.mark.parametrize(
    ("mode", "path", "message"),
    [
        ("sft", "global_step_2", "is a checkpoint of RL, but this run does sft; start from its"),
        ("rl", "sft/global_step_1", "is a checkpoint of SFT, but this run does rl; start from its"),
        ("sft+rl", "global_step_9", "is not a global_step_N folder"),
        ("sft+rl", "rollouts", "is not a global_step_N folder"),
    ],
)
def test_resume_path_that_does_not_fit_the_mode_is_refused(
    copy: Path,
    finished: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    mode: str,
    path: str,
    message: str,
) -> None:
    wanted = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={copy / path}"]
    assert again(copy, finished, f"trainer.mode={mode}", *wanted) == 4
    assert message in error_of(capsys)


def test_starting_over_moves_the_earlier_run_to_previous_1(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = result_of(copy)
    assert again(copy, finished, "trainer.resume_mode=disable") == 0
    assert_same_result(result_of(copy), before)
    assert_same_result(result_of(copy / "previous.1"), before)
    assert "starting over" in capsys.readouterr().out


def test_resume_with_other_settings_is_refused_with_the_difference(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = result_of(copy)
    assert again(copy, finished, "actor_rollout_ref.actor.optim.lr=5e-4") == 4
    error = error_of(capsys)
    assert "actor_rollout_ref.actor.optim.lr: 0.0001 -> 0.0005" in error
    assert "trainer.resume_mode=disable" in error
    assert_same_result(result_of(copy), before)
    # Settings that do not change results may differ.
    assert again(copy, finished, "actor_rollout_ref.rollout.max_num_seqs=2") == 0


def test_resume_with_an_unreadable_config_file_is_refused(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with (copy / "config.yaml").open("a", encoding="utf-8") as file:
        file.write("brand_new_section:\n  key: 1\n")
    assert again(copy, finished) == 4
    assert "cannot be read" in error_of(capsys)


def test_folder_in_use_is_refused(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with (copy / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert again(copy, finished) == 4
    assert "another run is using" in error_of(capsys)
    assert again(copy, finished) == 0


def test_resume_with_another_thread_count_prints_a_note(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["trainer.total_training_steps=4", "trainer.num_threads=2"]
    try:
        assert again(copy, finished, *more) == 0
    finally:
        assert again(copy, finished, "trainer.num_threads=1") == 0
    said = capsys.readouterr().out
    assert "written with 1 threads, this run uses 2" in said
    assert "trainer.num_threads=1 avoids it" in said


def test_resume_on_a_cpu_with_other_bf16_products_prints_a_note(
    copy: Path,
    finished: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = processor.bf16_products()
    monkeypatch.setattr(processor, "bf16_products", lambda: "an abacus")
    assert again(copy, finished, "trainer.total_training_steps=4") == 0
    said = capsys.readouterr().out
    assert f"written with {here} for bf16 products, this machine uses an abacus" in said


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "short":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        raw = bytearray(path.read_bytes())
        raw[-40] ^= 1
        path.write_bytes(raw)


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        ("actor/optimizer.safetensors", "missing", "is missing"),
        ("actor/huggingface/model.safetensors", "short", "bytes instead of"),
        ("actor/optimizer.safetensors", "flipped", "has checksum"),
        ("data.json", "missing", "is missing"),
    ],
)
def test_damaged_checkpoint_is_refused_with_file_and_remedy(
    copy: Path,
    finished: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    file: str,
    kind: str,
    message: str,
) -> None:
    damage(copy / "global_step_3" / file, kind)
    assert again(copy, finished) == 4
    error = error_of(capsys)
    assert f"{file}" in error
    assert message in error
    assert "trainer.resume_mode=resume_path" in error


def test_checkpoint_of_a_newer_format_is_refused(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "global_step_3" / MANIFEST
    manifest: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format_version": 99}))
    assert again(copy, finished) == 4
    assert "newer version of slipstream (format_version 99" in error_of(capsys)


def test_resume_works_without_the_tracker_file(copy: Path, finished: tuple[Path, Path]) -> None:
    (copy / TRACKER).unlink()
    assert again(copy, finished, "trainer.total_training_steps=4") == 0
    assert steps_of(copy) == [3, 4]
    assert sorted(metrics_of(copy)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("inner", ["actor/huggingface", "."])
def test_rl_from_an_sft_checkpoint_equals_a_run_of_both_phases(
    copy: Path, finished: tuple[Path, Path], tmp_path: Path, inner: str
) -> None:
    start = copy / "sft" / "global_step_2" / inner
    overrides = [
        "sft.total_training_steps=0",
        "actor_rollout_ref.model.init=null",
        f"actor_rollout_ref.model.path={start}",
    ]
    assert again(tmp_path / "rl", finished, *overrides) == 0
    # Rollouts depend only on weights, prompts and seed, so they equal those of the whole run.
    assert records_of(tmp_path / "rl" / "rollouts") == records_of(copy / "rollouts")
    ours, theirs = policy(tmp_path / "rl", 3), policy(copy, 3)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_run_resumed_in_rl_does_not_need_its_sft_folder(
    copy: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "sft")
    assert again(copy, finished, "trainer.total_training_steps=4") == 0
    assert not (copy / "sft").exists()
    assert steps_of(copy) == [3, 4]


def test_kl_penalty_added_on_resume_starts_with_its_configured_coefficient(
    copy: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    overrides = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.25",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={copy}/global_step_2",
    ]
    assert again(tmp_path / "new", finished, *overrides) == 0
    assert metrics_of(tmp_path / "new")[3]["actor/reward_kl_penalty_coeff"] == 0.25


def test_resume_with_kl_loss_needs_the_reference_policy(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    assert again(tmp_path / "whole", finished, kl) == 0
    assert again(tmp_path / "run", finished, kl, "trainer.total_training_steps=2") == 0
    (tmp_path / "run" / "sft").rename(tmp_path / "elsewhere")
    assert again(tmp_path / "run", finished, kl) == 4
    error = error_of(capsys)
    assert "the policy that RL started from, the result of SFT" in error
    overrides = [
        kl,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/run/global_step_2",
        f"actor_rollout_ref.ref.path={tmp_path}/elsewhere/global_step_2",
    ]
    assert again(tmp_path / "new", finished, *overrides) == 0
    assert "was made with other settings: actor_rollout_ref.ref.path" in capsys.readouterr().out
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "sft")
    assert again(tmp_path / "run", finished, kl) == 0
    expected = metrics_of(tmp_path / "whole")[3]
    assert expected["actor/kl_loss"] > 0
    for name in ("run", "new"):
        assert metrics_of(tmp_path / name)[3] == expected


def test_rl_starts_from_the_sft_result_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both, apart, reward = tmp_path / "both", tmp_path / "apart", write_reward(tmp_path)
    settings = ("trainer.val_before_train=false", f"{ACTOR}.use_kl_loss=true")
    assert main(tiny(both, *settings, reward=reward)) == 0
    assert main([*tiny(apart, *settings, reward=reward), "trainer.mode=sft"]) == 0
    line = [*tiny(apart, *settings, reward=reward), "trainer.mode=rl"]
    assert main([*line, "trainer.total_training_steps=1"]) == 0
    assert "RL starts from the SFT in this folder" in capsys.readouterr().out
    # Resume from the RL checkpoint: the reference is still the result of SFT.
    assert main([*line, "trainer.total_training_steps=2"]) == 0
    expected = policy(both, 2)
    assert all(torch.equal(expected[name], w) for name, w in policy(apart, 2).items())


def test_resume_with_a_longer_schedule_prints_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*rl_only(tmp_path / "run"), f"{ACTOR}.optim.lr_scheduler_type=cosine"]
    assert main([*line, "trainer.total_training_steps=1"]) == 0
    assert "learning-rate schedule" not in capsys.readouterr().out
    assert main([*line, "trainer.total_training_steps=2"]) == 0
    assert "actor_rollout_ref.actor.optim.total_training_steps to keep" in capsys.readouterr().out
