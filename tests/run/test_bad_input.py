"""Errors of users end with one line that names problem and remedy, and with an exit code."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.build.policy import make_decoder
from slipstream.checkpoint.state import huggingface_folder
from slipstream.checkpoint.tree import save_tree
from slipstream.cli import main
from slipstream.config import load_config
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from slipstream.errors import CheckpointError
from slipstream.metrics.loggers import read_jsonl
from slipstream.models import save_checkpoint
from slipstream.run.rollout_dump import dump_groups
from slipstream.types import Group, Prompt, Sample
from tests.run.helpers import ACTOR, ROLLOUT, rl_only, steps_of, tiny, write_reward

MODEL = "actor_rollout_ref.model"
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
FAST = ("trainer.logger=[file]", "data.val_size=1", "trainer.test_freq=1000")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model folder; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("model")
    steps = "trainer.total_training_steps=1"
    assert main(rl_only(folder, steps, *FAST)) == 0
    return huggingface_folder(folder / "global_step_1")


def refused(line: Sequence[str], code: int, capsys: pytest.CaptureFixture[str], *parts: str) -> str:
    """Run `line`, which must end with `code` and one short error that holds all of `parts`."""
    capsys.readouterr()
    assert main(line) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in parts:
        assert part in error
    return error


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, folder / "pytorch_model.bin")


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "code", "parts"),
    [
        (cut_short, 4, ["model.safetensors: corrupt or cut short"]),
        (not_finite, 4, ["tensor model.norm.weight has NaN or infinite values"]),
        (pickled, 4, ["pytorch_model.bin is a pickle file", "can run code", "save_pretrained"]),
        (without_weights, 4, ["neither model.safetensors nor"]),
        (without_tokenizer, 3, ["has no tokenizer files", f"{MODEL}.tokenizer_path"]),
    ],
)
def test_damaged_model_folder_is_refused(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    code: int,
    parts: list[str],
) -> None:
    shutil.copytree(model, tmp_path / "model")
    damage(tmp_path / "model")
    line = rl_only(tmp_path / "run", f"{MODEL}.init=null", f"{MODEL}.path={tmp_path}/model")
    assert str(tmp_path / "model") in refused(line, code, capsys, *parts)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("nowhere/at/all", "give a folder with config.json"),
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
    ],
)
def test_missing_model_folder_is_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, remedy: str
) -> None:
    line = rl_only(tmp_path / "run", f"{MODEL}.init=null", f"{MODEL}.path={path}")
    refused(line, 4, capsys, f"{MODEL}.path={path} is not a folder", remedy)


def file_run(tmp_path: Path, model: Path, files: Path, *overrides: str, reward: Path) -> list[str]:
    return rl_only(
        tmp_path / "run",
        f"{MODEL}.init=null",
        f"{MODEL}.path={model}",
        "data.task=null",
        f"data.train_files={files}",
        *FAST[:1],
        *overrides,
        reward=reward,
    )


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"{i} 2 3"}],
            "reward_model": {"ground_truth": "6"},
        }
        for i in range(4)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_tokenizer_without_chat_template_needs_a_custom_one(
    model: Path, reward: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    line = file_run(tmp_path, tmp_path / "model", chats, reward=reward)
    refused(line, 3, capsys, "no chat template", f"{MODEL}.custom_chat_template", "row 0")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert main([*line, f"{MODEL}.custom_chat_template='{template}'"]) == 0


def test_parquet_file_without_prompt_column_needs_prompt_key(
    model: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"question": ["1 2", "3 4"]}), path)
    line = file_run(tmp_path, model, path, reward=reward)
    parts = ["has no column 'prompt'", "columns found: question", "data.prompt_key"]
    refused(line, 3, capsys, str(path), *parts)
    assert main([*line, "data.prompt_key=question"]) == 0


def test_overlong_prompts_are_refused_filtered_or_truncated(
    model: Path, reward: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = file_run(tmp_path, model, chats, "data.max_prompt_length=2", reward=reward)
    remedy = "data.filter_overlong_prompts=true"
    refused(line, 3, capsys, "3 tokens are more than data.max_prompt_length 2", remedy)
    refused([*line, remedy], 3, capsys, "no prompt is left: 4 longer")
    assert main([*line, "data.truncation=left"]) == 0


def test_task_with_prompts_over_the_limit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", "data.max_prompt_length=4")
    refused(line, 2, capsys, "below the longest prompt of data.task=countdown", "_length=7")


def test_context_too_small_for_prompt_and_response_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = [f"{MODEL}.init=null", f"{MODEL}.path={model}", "data.max_response_length=300"]
    parts = ["316 tokens, but the model has max_position_embeddings=256", "to 256 together"]
    refused(rl_only(tmp_path / "a", *path), 2, capsys, *parts)
    line = rl_only(tmp_path / "b", f"{ROLLOUT}.max_model_len=20")
    refused(line, 2, capsys, f"set {ROLLOUT}.max_model_len=48")


def test_kv_cache_budget_too_small_for_one_request_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A request has 64 slots of 2 layers x (keys, values) x 16 x 4 bytes = 256 bytes each.
    line = rl_only(tmp_path / "a", f"{ROLLOUT}.kv_cache_bytes=16383")
    parts = ["kv_cache_bytes=16383 is too small", "48 tokens need 16384 bytes; raise it"]
    refused(line, 2, capsys, *parts)
    line = rl_only(tmp_path / "b", f"{ROLLOUT}.gpu_memory_utilization=0")
    refused(line, 2, capsys, "gpu_memory_utilization=0 of", "is too small", "raise it")


def test_too_few_prompts_for_one_batch_are_refused(
    model: Path, reward: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = ["trainer.total_training_steps=null", "data.train_batch_size=9"]
    line = file_run(tmp_path, model, chats, *epochs, reward=reward)
    refused(line, 3, capsys, "4 training prompts in 1 epochs do not fill one batch")
    assert main([*line, "trainer.total_epochs=3"]) == 0
    assert steps_of(tmp_path / "run") == [1]


def test_unknown_algorithm_names_are_refused_with_known_ones(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for override, known in (
        ("algorithm.adv_estimator=grpoo", "rloo"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "vanilla"),
        ("reward_model.reward_manager=naiv", "dapo"),
    ):
        line = rl_only(tmp_path / "run", override, reward=reward)
        refused(line, 2, capsys, override.rpartition("=")[2], known)


def test_run_ends_after_four_updates_that_are_not_finite(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [*FAST, "trainer.total_training_steps=9"]
    line = rl_only(tmp_path / "nan", *steps, f"{ACTOR}.optim.lr=1e20", reward=reward)
    parts = ["not finite in 4 updates in a row", "learning rate (1e+20 now) is too high"]
    refused(line, 7, capsys, *parts)
    skipped = [m["training/skipped_steps"] for _, m in read_jsonl(tmp_path / "nan/metrics.jsonl")]
    assert skipped == [0, 1, 2, 3]
    line = rl_only(tmp_path / "inf", *steps, f"{ACTOR}.optim.lr=1e38", reward=reward)
    refused(line, 7, capsys, "an engine refused the new weights", "learning rate is likely too")
    line = tiny(tmp_path / "sft", *steps, "sft.total_training_steps=9", "sft.optim.lr=1e38")
    refused(line, 7, capsys, "not finite in 4 updates in a row")


def broken(tmp_path: Path, body: str) -> Path:
    return write_reward(tmp_path, HEAD + body)


@pytest.mark.parametrize("body", ["    raise KeyError('answer')\n", "    return 'good'\n"])
def test_failing_reward_function_stops_scores_zero_or_drops_as_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    reason = "KeyError: 'answer'" if "raise" in body else "returned str, not a number"

    def line(policy: str) -> list[str]:
        overrides = [*FAST, "trainer.total_training_steps=4", f"reward_model.on_failure={policy}"]
        return rl_only(tmp_path / policy, *overrides, reward=broken(tmp_path, body))

    refused(line("stop"), 6, capsys, "compute_score failed on sample", reason, "zero or drop")

    assert main(line("zero")) == 7
    printed = capsys.readouterr()
    said = f"4 of 4 samples: reward 0, because the reward function failed: {reason}"
    assert printed.out.count(said) == 1
    assert "no response of the first 3 steps could be scored" in printed.err
    metrics = dict(read_jsonl(tmp_path / "zero" / "metrics.jsonl"))
    assert [metrics[step]["training/num_failed_rewards"] for step in range(1, 4)] == [4] * 3
    assert [metrics[step]["training/num_zero_variance_groups"] for step in range(1, 4)] == [2] * 3
    assert [metrics[step]["critic/score/mean"] for step in range(1, 4)] == [0] * 3

    parts = ["3 steps in a row had no sample to train on", reason, "on_failure=zero"]
    refused(line("drop"), 7, capsys, *parts)
    metrics = dict(read_jsonl(tmp_path / "drop" / "metrics.jsonl"))
    assert [metrics[step]["training/skipped_batch"] for step in (1, 2)] == [1, 1]


def test_reward_function_that_never_returns_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = broken(tmp_path, "    import threading\n    threading.Event().wait()\n")
    overrides = [
        *FAST,
        "trainer.total_training_steps=9",
        "reward_model.timeout_s=0.05",
        "reward_model.num_workers=2",
        f"{ROLLOUT}.n=6",
    ]
    line = rl_only(tmp_path / "run", *overrides, reward=reward)
    refused(line, 6, capsys, "deadline of 0.05 s", "raise reward_model.timeout_s")


def test_training_continues_with_groups_that_lost_samples(tmp_path: Path) -> None:
    body = (
        "    if len(solution_str) % 2:\n        raise ValueError('odd')\n"
        "    return float(len(solution_str))\n"
    )
    overrides = [
        *FAST,
        "trainer.total_training_steps=4",
        "reward_model.on_failure=drop",
        "data.train_batch_size=4",
        "data.max_response_length=12",
    ]
    assert main(rl_only(tmp_path / "run", *overrides, reward=broken(tmp_path, body))) == 0
    metrics = [m for step, m in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert sum(m["training/num_failed_rewards"] for m in metrics) > 0
    assert sum(m["training/num_lone_samples"] for m in metrics) > 0


def test_equal_rewards_for_ten_steps_give_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = broken(tmp_path, "    return 0.0\n")
    overrides = [*FAST, "trainer.total_training_steps=12", "data.max_response_length=4"]
    assert main(rl_only(tmp_path / "run", *overrides, reward=reward)) == 0
    said = re.findall("warning: .*", capsys.readouterr().out)
    assert len(said) == 1
    assert "step 10: in each of the last 10 steps all rewards were equal" in said[0]
    assert "raise data.max_response_length" in said[0]


def test_eval_and_export_refuse_folders_that_are_no_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    out = ["--output", str(tmp_path / "out")]
    refused(["export", "--checkpoint", f"{tmp_path}/x", *out], 4, capsys, "does not exist")
    refused(["export", "--checkpoint", f"{tmp_path}/empty", *out], 4, capsys, "config.json")
    refused(["eval", "--checkpoint", f"{tmp_path}/empty"], 2, capsys, "--recipe NAME")
    run = model.parents[2]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "global_step_1" / "data.json").write_text("{}")
    refused(["eval", "--checkpoint", f"{tmp_path}/run"], 4, capsys, "data.json has")
    (tmp_path / "file").write_text("")
    line = ["export", "--checkpoint", str(model), "--output", str(tmp_path / "file")]
    refused(line, 4, capsys, "is not an empty folder")


def test_full_disk_leaves_the_previous_checkpoint_usable(
    monkeypatch: pytest.MonkeyPatch,
    reward: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = 0

    def second_save_fails(path: Path, tree: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_tree(path, tree)

    monkeypatch.setattr("slipstream.run.snapshot.save_tree", second_save_fails)
    overrides = [*FAST, "trainer.total_training_steps=3", "trainer.save_freq=1"]
    line = rl_only(tmp_path / "run", *overrides, reward=reward)
    error = refused(line, 4, capsys, "disk full while saving", "stays the latest checkpoint")
    assert f"{tmp_path}/run/global_step_1" in error
    assert steps_of(tmp_path / "run") == [1]
    assert main(line) == 0
    assert [step for step, _ in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        ("reference", [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.path"]),
        ("critic", ["algorithm.adv_estimator=gae", "critic.model.path"]),
    ],
)
def test_reference_or_critic_with_another_tokenizer_is_refused_before_sft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, overrides: list[str]
) -> None:
    config = load_config([], recipe="tiny", notify=lambda _: None)
    policy = make_decoder(config, build_tokenizer(), None)
    save_checkpoint(policy, tmp_path / "m", save_tokenizer=build_tokenizer(240).save_pretrained)
    *others, path = overrides
    assert main(tiny(tmp_path / "run", *others, f"{path}={tmp_path / 'm'}")) == 4
    assert f"the {role}'s tokenizer is not the policy's" in capsys.readouterr().err
    assert not (tmp_path / "run" / "sft").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=grpoo", "did you mean 'grpo'"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "did you mean 'vanilla'"),
        (f"{ROLLOUT}.name=fake", "is for tests"),
        ("actor_rollout_ref.ref.path=nowhere", "nowhere"),
        (
            "algorithm.adv_estimator=gae trainer.critic_warmup=50",
            "trains the policy only from step 50 on",
        ),
        (
            "algorithm.adv_estimator=gae critic.optim.lr_scheduler_type=cosine "
            "critic.optim.lr_warmup_steps=99",
            "set critic.optim.lr_scheduler_type=constant or more steps",
        ),
    ],
)
def test_settings_that_rl_cannot_use_are_refused_before_sft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(tiny(tmp_path / "run", *override.split())) in (2, 4)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "sft").exists()


def test_ground_truth_that_is_not_json_is_recorded_as_text(tmp_path: Path) -> None:
    sample = Sample(uid="u", ground_truth=Decimal("1.50"))
    groups = [Group(index=0, prompt=Prompt(uid="p", ids=[1]), samples=[sample])]
    dump_groups(tmp_path / "1.jsonl", groups, build_tokenizer(), 1)
    assert json.loads((tmp_path / "1.jsonl").read_text())["gts"] == "1.50"


def test_rollout_dump_that_cannot_be_written_names_step_and_path(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where a folder belongs")
    with pytest.raises(CheckpointError, match="step 3: the samples cannot be written to"):
        dump_groups(tmp_path / "rollouts" / "3.jsonl", [], build_tokenizer(), 3)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["buffer_bytes=1000"], ["speculative.train.buffer_bytes=1000", "max_seq_len"]),
        # The head is trained after steps 4 and 8.
        (
            ["optim.lr_scheduler_type=linear", "optim.lr_warmup_steps=6"],
            ["9 RL steps train the draft head 6 times", "=constant"],
        ),
        (
            [
                "mode=opportunistic",
                "training_interval_steps=10",
                "optim.lr_scheduler_type=linear",
            ],
            ["has no fixed number of steps", "optim.lr_scheduler_type=constant"],
        ),
    ],
)
def test_impossible_cotraining_settings_are_refused(
    settings: list[str],
    parts: list[str],
    tmp_path: Path,
    reward: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["enable_drafter_training=true", "training_interval_steps=4", "updates_per_training=3"]
    line = rl_only(
        tmp_path / "run",
        "speculative.enable=true",
        "trainer.total_training_steps=9",
        *(f"speculative.train.{one}" for one in given + settings),
        reward=reward,
    )
    refused(line, 2, capsys, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_opportunistic_cotraining_needs_a_free_core(
    tmp_path: Path,
    reward: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.build.cotraining.usable_cores", lambda: 1)
    line = rl_only(
        tmp_path / "run",
        "speculative.enable=true",
        "speculative.train.enable_drafter_training=true",
        "speculative.train.mode=opportunistic",
        reward=reward,
    )
    refused(line, 2, capsys, "uses 1 threads on 1 cores; give it more cores", "=interval")
    # With two cores, the run can leave one free, or lend one.
    monkeypatch.setattr("slipstream.build.cotraining.usable_cores", lambda: 2)
    parts = ("uses 2 threads on 2 cores", "rollout.one_thread_below=4", "lower trainer.num_threads")
    refused([*line, "trainer.num_threads=2"], 2, capsys, *parts)


def test_one_thread_below_needs_the_compiled_kernels(
    tmp_path: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "actor_rollout_ref.rollout.one_thread_below"
    line = rl_only(tmp_path / "run", "actor_rollout_ref.rollout.name=hf", f"{few}=4", reward=reward)
    kernels = "needs the embedded engine's compiled CPU kernels"
    refused(line, 2, capsys, f"{few}=4 {kernels}", f"{few}=0")


def test_val_only_without_validation_data_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(build_tokenizer(), tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "2 + 2 ="}\n')
    line = rl_only(
        tmp_path / "run",
        "data.task=null",
        f"data.tokenizer={tmp_path / 'tokenizer'}",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "trainer.total_training_steps=1",
        reward=write_reward(tmp_path),
    )
    assert main([*line, "trainer.val_only=true"]) == 2
    assert "trainer.val_only=true has nothing to validate on; set data.val_files=FILE" in (
        capsys.readouterr().err
    )
    assert main([*line, "trainer.test_freq=1"]) == 0
    assert "trainer.test_freq=1 has no effect: there is nothing to validate on" in (
        capsys.readouterr().out
    )


def test_run_without_any_scored_response_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = write_reward(tmp_path, HEAD + "    1 / 0\n")
    for policy in ("zero", "drop"):
        line = rl_only(
            tmp_path / policy,
            f"reward_model.on_failure={policy}",
            "trainer.total_training_steps=2",
            reward=reward,
        )
        assert main(line) == 7
        error = capsys.readouterr().err
        assert "no response of the first 2 steps could be scored" in error
        assert "ZeroDivisionError: division by zero" in error
        assert "slipstream reward RUN/rollouts/2.jsonl" in error
        assert (tmp_path / policy / "rollouts" / "2.jsonl").exists()
