"""Tests of `slipstream train --dry-run` through the command line, and of the memory estimate."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config.load import load_config
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.metrics.loggers import read_jsonl
from slipstream.models.config import ModelConfig
from slipstream.preflight import dry_run
from slipstream.preflight.dry_run import looked_at
from slipstream.preflight.memory_estimate import COPY, MemoryEstimate, PhaseBytes, estimate_memory
from slipstream.run.train import trial
from tests.docs.pages import ROOT
from tests.run.helpers import ACTOR, ROLLOUT, rl_only, tiny

MODEL = "actor_rollout_ref.model"


def test_prints_settings_batches_memory_and_a_step_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny(tmp_path / "run"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "train_batch_size: 2" in out
    assert re.search(r"^RL step +2 prompts x 2 responses = 4 samples$", out, re.MULTILINE)
    assert re.search(r"^total if all responses have full length +[\d.]+ [MG]B$", out, re.MULTILINE)
    assert re.search(r"^SFT 1/1 +loss", out, re.MULTILINE)
    assert re.search(r"^RL 1/1 +reward", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_raises_the_same_error_as_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", f"{ROLLOUT}.kv_cache_bytes=1000")
    errors = []
    for more in ([], ["--dry-run"]):
        assert main([*line, *more]) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1]
    assert "kv_cache_bytes=1000 is too small" in errors[1]


def test_the_tiny_step_works_with_the_settings_of_a_long_run(tmp_path: Path) -> None:
    """The settings include schedules, warm-ups, mini-batches and group filters."""
    line = rl_only(
        tmp_path / "run",
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.lr_warmup_steps=10",
        "critic.ppo_mini_batch_size=2",
        "trainer.critic_warmup=3",
        "trainer.total_training_steps=100",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=3",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=6",
        "critic.ppo_micro_batch_size_per_gpu=3",
        "critic.use_dynamic_bsz=false",
        f"{ROLLOUT}.over_sample_rate=0.5",
    )
    assert main([*line, "--dry-run"]) == 0


HUGE = 10**18


@pytest.mark.parametrize(
    "setting",
    [
        f"{ACTOR}.ppo_epochs={HUGE}",
        f"{ROLLOUT}.n={HUGE}",
        f"data.train_batch_size={HUGE}",
        f"trainer.total_training_steps={HUGE}",
    ],
)
def test_huge_counts_do_not_lengthen_the_tiny_step(tmp_path: Path, setting: str) -> None:
    assert main([*rl_only(tmp_path / "run"), "--dry-run", setting]) == 0


def test_tiny_values_bound_every_count(tmp_path: Path) -> None:
    line = rl_only(
        tmp_path, f"{ROLLOUT}.n={HUGE}", f"{ACTOR}.ppo_epochs={HUGE}", f"critic.ppo_epochs={HUGE}"
    )
    config = load_config(
        [
            *line[3:],
            f"{ROLLOUT}.val_kwargs.n={HUGE}",
            f"{ROLLOUT}.val_kwargs.do_sample=true",
            f"{ROLLOUT}.val_kwargs.temperature=1",
        ],
        recipe="tiny",
    )
    values = dry_run.tiny_values(config, tmp_path)
    assert values[f"{ROLLOUT}.n"] == values[f"{ROLLOUT}.val_kwargs.n"] == dry_run.TINY_RESPONSES
    assert values[f"{ACTOR}.ppo_epochs"] == values["critic.ppo_epochs"] == dry_run.TINY_EPOCHS


def test_the_tiny_step_has_a_model_of_bounded_size(tmp_path: Path) -> None:
    init = f"{MODEL}.init"

    def sizes(*settings: str) -> tuple[int, int]:
        config = load_config([*rl_only(tmp_path)[3:], *settings], recipe="tiny")
        values = dry_run.tiny_values(config, tmp_path)
        return values[f"{init}.num_layers"], values[f"{init}.intermediate_size"]

    assert sizes() == (2, 64)
    assert sizes(f"{init}.num_layers=64", f"{init}.intermediate_size=8192") == (64, 8192)
    assert sizes(f"{init}.num_layers=5000") == (dry_run.TINY_LAYERS, 64)
    assert sizes(f"{init}.intermediate_size=1000000") == (2, dry_run.TINY_WIDTH)
    config = load_config(
        [*rl_only(tmp_path)[3:], f"{init}.max_position_embeddings=16777216"], recipe="tiny"
    )
    values = dry_run.tiny_values(config, tmp_path)
    assert values[f"{init}.max_position_embeddings"] == dry_run.TINY_POSITIONS
    deep = ("spec_algorithm=EAGLE3", "aux_hidden_state_layer_ids=[1,80,90]")
    eagle = (f"speculative.eagle.{setting}" for setting in deep)
    assert sizes(f"{init}.num_layers=5000", *eagle)[0] == 91


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        (f"{MODEL}.init.num_layers={HUGE}", "actor_rollout_ref.model.init"),
        (f"{MODEL}.init.vocab_size={HUGE}", "actor_rollout_ref.model.init"),
        (f"{MODEL}.init.intermediate_size={HUGE}", "actor_rollout_ref.model.init"),
        (f"{MODEL}.init.max_position_embeddings={HUGE}", "actor_rollout_ref.model.init"),
        (f"{MODEL}.init.num_layers=1000000", "actor_rollout_ref.model"),
        (f"{MODEL}.lora_rank=1000000", f"{MODEL}.lora_rank=1000000"),
        ("trainer.num_threads=1000000", "trainer.num_threads=1000000"),
        ("trainer.nnodes=1000", "trainer.nnodes"),
    ],
)
def test_sizes_that_cannot_fit_are_refused_before_the_tiny_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, key: str
) -> None:
    assert main([*rl_only(tmp_path / "run"), "--dry-run", setting]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_existing_files_in_the_output_folders_stay_unchanged(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("rollouts", "validation", "run")]
    for folder in folders:
        (folder / "rollouts").mkdir(parents=True)
        (folder / "5.jsonl").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    line = tiny(
        folders[2],
        f"trainer.rollout_data_dir={folders[0]}",
        f"trainer.validation_data_dir={folders[1]}",
    )
    assert main([*line, "--dry-run"]) == 0
    assert sorted(tmp_path.rglob("*")) == before


class RecordingTrial:
    """Runs the real tiny step, and records its folder and metrics before they are deleted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._trial = trial
        monkeypatch.setattr(dry_run, "trial", self)

    def __call__(self, config: Config, mode: Mode) -> bool:
        finished = self._trial(config, mode)
        self.folder = Path(config.trainer.default_local_dir)
        self.metrics = read_jsonl(self.folder / "metrics.jsonl")
        return finished


@pytest.mark.parametrize("where", ["a=b,c", "out"])
def test_the_tiny_step_uses_the_run_folder_or_its_nearest_existing_parent(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder may be the only writable folder, so an existing one is used."""
    recorded, folder = RecordingTrial(monkeypatch), tmp_path / where
    line = [*tiny(folder)[:3], f"trainer.default_local_dir='{folder}'", "--dry-run"]
    assert main(line) == 0
    assert recorded.folder.parents[1] == tmp_path
    folder.mkdir()
    assert main(line) == 0
    assert recorded.folder.parents[1] == folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        (
            ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere"),
            4,
            "/nowhere",
        ),
        (("trainer.val_only=true",), 2, "trainer.val_only=true"),
    ],
)
def test_missing_checkpoints_and_val_only_are_errors(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    assert main([*rl_only(tmp_path / "run", *settings), "--dry-run"]) == status
    assert message in capsys.readouterr().err


def test_a_folder_of_a_run_with_other_settings_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["sft", *tiny(folder)[1:]]) == 0
    assert main(["sft", *tiny(folder, "sft.optim.lr=0.5")[1:], "--dry-run"]) == 4
    assert "holds a run with other settings" in capsys.readouterr().err


def test_an_interrupted_step_returns_status_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.preflight.dry_run.trial", lambda config, mode: False)
    assert main([*tiny(tmp_path / "run"), "--dry-run"]) == 130
    assert "interrupted after" in capsys.readouterr().out


def test_the_tiny_step_trains_the_draft_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordingTrial(monkeypatch)
    line = rl_only(
        tmp_path / "run",
        "speculative.enable=true",
        "speculative.train.enable_drafter_training=true",
        "speculative.train.mode=interval",
        "speculative.train.training_interval_steps=20",
    )
    assert main([*line, "--dry-run"]) == 0
    ((_, metrics),) = recorded.metrics
    assert metrics["drafter/updates"] > 0


def test_dry_runs_of_the_commands_sft_and_rl(tmp_path: Path) -> None:
    line = tiny(tmp_path / "run")
    assert main(["sft", *line[1:], "--dry-run"]) == 0
    assert main(["rl", *line[1:], "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def estimated(*overrides: str) -> PhaseBytes:
    config = load_config(
        ["sft.total_training_steps=0", *overrides], recipe="tiny", notify=lambda _: None
    )
    policy, batches = looked_at(config, "rl")
    assert isinstance(policy, ModelConfig)
    return estimate_memory(config, "rl", policy, batches).phases["RL"]


def test_the_estimate_grows_with_models_samples_and_micro_batches() -> None:
    plain = estimated()
    assert set(plain.held) == {
        "policy and optimizer",
        "weights of the engine",
        "KV cache",
        "sampled tokens",
    }
    critic = estimated("algorithm.adv_estimator=gae")
    assert critic.held["critic and optimizer"] == pytest.approx(
        plain.held["policy and optimizer"], rel=0.05
    )
    # With LoRA, the critic still trains all of its weights.
    lora = "actor_rollout_ref.model.lora_rank=4"
    both = estimated("algorithm.adv_estimator=gae", lora)
    assert both.held["critic and optimizer"] == critic.held["critic and optimizer"]
    assert both.held["policy and optimizer"] < 0.6 * plain.held["policy and optimizer"]
    reference = estimated(f"{ACTOR}.use_kl_loss=true")
    assert "reference" not in estimated(f"{ACTOR}.use_kl_loss=true", lora).held
    assert 3 * reference.held["reference"] == pytest.approx(
        plain.held["policy and optimizer"], rel=0.05
    )
    longer = estimated(f"{ROLLOUT}.n=8")
    assert longer.held["sampled tokens"] == 4 * plain.held["sampled tokens"]
    step = "an optimizer step"
    assert longer.one_at_a_time[step] > 1.5 * plain.one_at_a_time[step]
    # With a fixed micro-batch size, more sequences per forward pass need more memory.
    rows = [
        estimated(
            f"{ROLLOUT}.n=8",
            f"{ACTOR}.use_dynamic_bsz=false",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={count}",
        ).one_at_a_time[step]
        for count in (1, 16)
    ]
    assert rows[1] > 1.5 * rows[0]


def test_a_quantized_copy_of_the_policy_is_counted_and_must_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("speculative.enable=true", "speculative.spec_strategy=quantized")
    plain, eight = estimated().held, estimated(*given).held
    assert set(eight) - set(plain) == {COPY}
    # 8.5 bits for each weight of a matrix, compared with two layouts in the engine and fp32.
    assert eight[COPY] < 0.2 * plain["weights of the engine"]
    four = estimated(
        *given, "speculative.quantized.bits=4", "speculative.quantized.lm_head_bits=4"
    ).held
    assert four[COPY] * 17 == eight[COPY] * 9
    line = rl_only(tmp_path / "run", *given)
    assert main([*line, "--dry-run"]) == 0
    assert re.search(r"^quantized copy of the policy +\d+ MB$", capsys.readouterr().out, re.M)
    # Enough for this policy and its optimizer, but not for the copy, too.
    free = plain["policy and optimizer"] + eight[COPY] // 2
    monkeypatch.setattr(dry_run, "free_bytes", lambda _: free)
    assert main([*line, "--dry-run"]) == 2
    assert "spec_strategy=quantized: the quantized copy of the policy needs" in (
        capsys.readouterr().err
    )


def test_an_adapter_of_one_layer_has_an_estimate() -> None:
    found = estimated(
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.target_modules=[1.self_attn.q_proj]",
    )
    assert found.held["policy and optimizer"] > 0


def test_parts_without_an_estimate_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", "speculative.enable=true", "speculative.spec_strategy=history")
    assert main([*line, "--dry-run"]) == 0
    assert "not counted: the text that history drafts come from" in capsys.readouterr().out


def test_the_total_counts_the_largest_phase_and_its_largest_temporary_part() -> None:
    estimate = MemoryEstimate(
        base=1000,
        phases={
            "SFT": PhaseBytes(held={"a": 100}, one_at_a_time={"b": 7, "c": 20}),
            "RL": PhaseBytes(held={"a": 30, "d": 50}),
        },
    )
    assert estimate.total == 1120


def test_the_estimate_is_within_a_quarter_of_the_memory_of_a_real_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The smallest case of the benchmark, which exits with an error if the difference is larger.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["bench.memory", "quickstart"])
    runpy.run_module("bench.memory", run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(r"quickstart +estimated +\d\.\d\d GB .* used +\d\.\d\d GB: ", output)
