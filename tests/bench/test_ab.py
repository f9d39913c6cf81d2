"""The same RL with and without drafts: settings of its runs, and the results read from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from slipstream.bench import ab
from slipstream.bench.ab import (
    ACCEPT_CURVE,
    CHAINS,
    COTRAINED,
    DEVICE,
    DIVERGENCE,
    FROZEN,
    HEAD,
    HISTORY,
    PLAIN,
    AbBench,
    RunOutcome,
    arms_of,
    command,
    curve,
    divergence,
    identical,
    read_outcome,
    summary,
)
from slipstream.bench.interleaved_runs import SETTINGS
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.train_command import say_ab
from slipstream.checkpoint.layout import policy_folder
from slipstream.cli import main
from slipstream.errors import CheckpointError, ConfigError, EngineError
from tests.run.helpers import write_reward


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("")
    return folder


def test_a_run_with_a_fixed_head_needs_a_head() -> None:
    assert list(arms_of(None)) == [PLAIN, COTRAINED]
    arms = arms_of(Path("draft"))
    assert list(arms) == [PLAIN, FROZEN, COTRAINED]
    assert "speculative.enable=false" in arms[PLAIN]
    assert "speculative.train.enable_drafter_training=false" in arms[FROZEN]
    # Without co-training, nothing would use a core that decoding frees.
    lending = "actor_rollout_ref.rollout.one_thread_below=0"
    assert [lending in arms[name] for name in (PLAIN, FROZEN, COTRAINED)] == [True, True, False]
    assert "speculative.train.enable_drafter_training=true" in arms[COTRAINED]
    assert "speculative.eagle.spec_model_path=draft" in arms[COTRAINED]
    wide = arms_of(Path("draft"), trees=True)
    assert list(wide) == [*arms, CHAINS]
    assert wide[CHAINS][: len(arms[COTRAINED])] == arms[COTRAINED]
    assert "speculative.eagle.spec_topk=1" in wide[CHAINS]
    parts = arms_of(Path("draft"), both=True)
    assert list(parts) == [*arms, HEAD, HISTORY]
    assert parts[HEAD] == [*arms[COTRAINED], "speculative.spec_strategy=eagle"]
    assert "speculative.spec_strategy=history" in parts[HISTORY]
    assert "speculative.train.enable_drafter_training=false" in parts[HISTORY]
    assert "speculative.eagle.spec_model_path=null" in parts[HISTORY]


def outcome_of(first: dict[str, list[int]]) -> RunOutcome:
    return RunOutcome(steps=[], responses="", weights="", first=first)


def test_divergence_is_per_token_at_which_responses_could_diverge() -> None:
    plain = outcome_of({"a": [1, 2, 3, 4], "b": [5, 6], "c": [7] * 10})
    assert divergence(plain, plain) == 0
    # One differs at its third token, and later tokens do not count; one is longer.
    other = outcome_of({"a": [1, 2, 9, 9], "b": [5, 6, 7], "c": [7] * 10})
    assert divergence(other, plain) == 2 / (3 + 3 + 10)
    assert divergence(plain, other) == 2 / (3 + 3 + 10)
    with pytest.raises(EngineError, match="different samples"):
        divergence(outcome_of({"a": [1]}), plain)


@pytest.mark.parametrize(
    ("device", "identical", "share", "good"),
    [
        ("cpu", 1.0, 0.0, True),
        ("cpu", 0.0, 0.001, False),
        ("cuda", 0.0, 0.001, True),
        ("cuda", 0.0, 0.2, False),
    ],
)
def test_only_equal_runs_pass_on_a_cpu_and_rare_divergence_passes_on_a_gpu(
    device: str, identical: float, share: float, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "identical": identical,
        DIVERGENCE: share,
        "rollout_speedup": 1.0,
        "step_speedup": 1.0,
    }
    row = ResultRow(
        benchmark="train",
        case="ab speculation",
        contender=FROZEN,
        dtype="",
        threads=None,
        seconds=Spread.of([1.0]),
        machine=this_machine(),
        values=values,
        settings={
            "weights_sha256": "w",
            "responses_sha256": "r",
            DEVICE: device,
            ACCEPT_CURVE: "",
        },
    )
    assert say_ab([row]) is good
    assert ("NOT identical" in capsys.readouterr().out) is (device == "cpu" and not good)


def test_a_run_with_chains_only_is_added_if_the_settings_allow_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = a_run(tmp_path / "run")
    (policy / "draft").mkdir()
    seconds = {PLAIN: 4.0, FROZEN: 2.0, COTRAINED: 1.0, CHAINS: 1.5}

    def outcome(folder: Path) -> RunOutcome:
        step = {"timing_s/step": 9.0, "timing_s/gen": seconds[folder.name]}
        return RunOutcome(steps=[step], responses="same", weights="same")

    monkeypatch.setattr(ab, "run_interleaved", lambda lines, say, lib: None)
    monkeypatch.setattr(ab, "read_outcome", outcome)
    monkeypatch.setattr(ab, "policy_kl", lambda first, last, rollouts, device: 0.25)
    monkeypatch.setattr(ab, "policy_folder", lambda folder: folder)
    monkeypatch.setattr(ab, "last_rollouts", lambda folder: folder)
    wide = ("speculative.eagle.spec_topk=2", "speculative.eagle.spec_verify_tokens=6")
    rows = ab.run(AbBench(policy=policy, settings=wide), lambda text: None)
    assert [row.contender for row in rows] == [PLAIN, FROZEN, COTRAINED, CHAINS]
    found = summary(rows)
    assert found["trees_over_chains"] == pytest.approx(1.5)
    assert found["trees_over_chains_by_step"] == pytest.approx(1.5)
    assert found["trees_over_chains_error"] == 0
    bandit = ("speculative.eagle.tune_algorithm=EG", "speculative.eagle.mab_configs=['2_2_4']")
    rows = ab.run(AbBench(policy=policy, settings=(*wide, *bandit)), lambda text: None)
    assert [row.contender for row in rows] == [PLAIN, FROZEN, COTRAINED]


def test_settings_of_all_runs_come_before_those_of_a_single_run(tmp_path: Path) -> None:
    bench = AbBench(policy=a_run(tmp_path), steps=3, settings=("trainer.seed=7",))
    line = command(bench, Path("start"), ["speculative.enable=true"], Path("target"))
    assert line[-2 - len(SETTINGS) :] == ["trainer.seed=7", "speculative.enable=true", *SETTINGS]
    assert "trainer.total_training_steps=3" in line
    assert "actor_rollout_ref.model.path=start" in line
    assert "trainer.default_local_dir=target" in line
    steps = command(AbBench(policy=tmp_path), Path("start"), [], Path("target"))
    assert not any("total_training_steps" in text for text in steps)


def test_a_folder_that_is_not_a_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`make quickstart` makes"):
        AbBench(policy=tmp_path)


@pytest.mark.parametrize("flags", [["--steps", "3"], ["--set", "a=b"], ["--policy", "runs/x"]])
def test_flags_of_whole_runs_need_ab(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *flags]) == 2
    assert "add --ab speculation" in capsys.readouterr().err


def written(folder: Path, *, response: str = "a", weight: bytes = b"w", steps: int = 2) -> Path:
    """A run folder with the files of `slipstream rl` that the benchmark reads."""
    (folder / "rollouts").mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        row = {"uid": f"p/{step}", "index": 0, "response_ids": [ord(response)] * step}
        (folder / "rollouts" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
        data = {"timing_s/step": 2.0 * step, "timing_s/gen": 1.0, "spec/accept_length": 3.0 + step}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "model.safetensors").write_bytes(weight)
    return folder


def test_an_outcome_has_seconds_metrics_and_hashes(tmp_path: Path) -> None:
    one = read_outcome(written(tmp_path / "one"))
    assert (one.seconds("step"), one.seconds("gen"), one.seconds("drafter")) == (6.0, 2.0, 0.0)
    assert one.values("spec/accept_length") == [4.0, 5.0]
    assert one.first == {"p/1/0": [97]}
    assert identical([one, read_outcome(written(tmp_path / "same"))])
    other_text = read_outcome(written(tmp_path / "text", response="b"))
    other_weight = read_outcome(written(tmp_path / "weight", weight=b"v"))
    assert not identical([one, other_text])
    assert not identical([one, other_weight])


def test_a_run_without_the_rollouts_of_a_step_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "one")
    (folder / "rollouts" / "2.jsonl").unlink()
    with pytest.raises(CheckpointError, match="2 RL steps and 1 files of rollouts"):
        read_outcome(folder)


def test_rows_compare_each_run_with_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = a_run(tmp_path / "run")
    (policy / "draft").mkdir()
    seconds = {PLAIN: 4.0, FROZEN: 2.0, COTRAINED: 1.0}
    ran: list[str] = []

    def outcome(folder: Path) -> RunOutcome:
        name = folder.name
        ran.append(name)
        weights = "other" if len(ran) > 3 and name == COTRAINED else "same"
        step = {"timing_s/step": 8 + seconds[name], "timing_s/gen": seconds[name]}
        if name != PLAIN:
            step["spec/accept_length"] = {FROZEN: 2.0, COTRAINED: 2.5}[name]
        return RunOutcome(steps=[step], responses="same", weights=weights)

    monkeypatch.setattr(ab, "run_interleaved", lambda lines, say, lib: None)
    monkeypatch.setattr(ab, "read_outcome", outcome)
    computed_on: list[str] = []

    def kl(first: Path, last: Path, rollouts: Path, device: torch.device) -> float:
        computed_on.append(device.type)
        return 0.25

    monkeypatch.setattr(ab, "policy_kl", kl)
    monkeypatch.setattr(ab, "policy_folder", lambda folder: folder)
    monkeypatch.setattr(ab, "last_rollouts", lambda folder: folder)
    rows = ab.run(AbBench(policy=policy), lambda text: None)
    assert ran == [PLAIN, FROZEN, COTRAINED]
    assert summary(rows) == {
        "identical": True,
        "rollout_speedup": {FROZEN: 2.0, COTRAINED: 4.0},
        "step_speedup": {FROZEN: 1.2, COTRAINED: 12 / 9},
        "accept_length_over_frozen": 0.25,
        DIVERGENCE: 0.0,
    }
    assert [row.settings[ab.ACCEPT_CURVE] for row in rows] == ["", "2.00", "2.50"]
    assert rows[1].values["share_gen"] == 0.2
    assert rows[1].values["policy_kl"] == 0.25
    # In the second round, one of the runs ends with other weights.
    rows = ab.run(AbBench(policy=policy, rounds=2), lambda text: None)
    assert summary(rows)["identical"] is False
    # The policy KL is computed once per benchmark, on the device of the runs.
    monkeypatch.setattr(ab, "device_of", lambda config: torch.device("cuda"))
    ab.run(AbBench(policy=policy), lambda text: None)
    assert computed_on == ["cpu", "cpu", "cuda"]


def test_a_curve_averages_parts_of_nearly_equal_size() -> None:
    assert curve([]) == []
    assert curve([3.0, 4.0]) == [3.0, 4.0]
    assert curve([1.0, 2.0, 3.0, 6.0, 9.0], points=2) == [1.5, 6.0]


def test_the_output_of_a_failed_run_is_shown(tmp_path: Path) -> None:
    policy = a_run(tmp_path)
    said: list[str] = []
    # The run fails because its settings name no prompts.
    with pytest.raises(EngineError, match="ended with status"):
        ab.run(AbBench(policy=policy), said.append)
    assert "set data.train_files=" in said[-1]
    # Unknown settings are refused before the first run.
    (policy / "config.yaml").write_text("data:\n  tusk: countdown\n")
    with pytest.raises(ConfigError, match=r"data\.tusk"):
        ab.run(AbBench(policy=policy), said.append)


def test_three_real_runs_from_one_policy_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Without this reward nothing is learned, and unchanged weights are always equal.
    reward = f"custom_reward_function.path={write_reward(tmp_path)}"
    tiny = ["--recipe", "tiny", f"trainer.default_local_dir={run}", "trainer.num_threads=1"]
    assert main(["sft", *tiny, reward]) == 0
    assert main(["draft", "--checkpoint", str(run)]) == 0
    file = tmp_path / "ab.json"
    cotraining = ["training_interval_steps=1", "updates_per_training=2", "held_out_every=2"]
    settings = [f"speculative.train.{text}" for text in cotraining]
    flags = ["--policy", str(run), "--steps", "3", "--json", str(file), "--set", *settings]
    assert main(["bench", "train", "--ab", "speculation", *flags]) == 0
    printed = capsys.readouterr().out
    assert "identical: responses, log-probs, rewards and final weights, bit for bit" in printed
    found = json.loads(file.read_text())
    assert found["identical"] is True
    assert list(found["rollout_speedup"]) == [FROZEN, COTRAINED]
    plain, frozen, cotrained = found["rows"]
    assert plain["settings"]["steps"] == 3
    assert plain["values"]["reward_first"] > 0
    assert 0 < plain["values"]["policy_kl"] < 1
    began = hashlib.sha256((policy_folder(run / "sft") / "model.safetensors").read_bytes())
    assert began.hexdigest() != plain["settings"]["weights_sha256"]
    assert plain["values"]["share_drafter"] == frozen["values"]["share_drafter"] == 0
    assert cotrained["values"]["share_drafter"] > 0
