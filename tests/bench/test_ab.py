"""The same RL with and without drafts: what its runs are given, and what is read from them."""

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
    FROZEN,
    PARTED,
    PLAIN,
    AbBench,
    RunOutcome,
    arms_of,
    command,
    curve,
    identical,
    parted,
    read_outcome,
    summary,
)
from slipstream.bench.command import _say_ab
from slipstream.bench.interleaved_runs import SETTINGS
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.checkpoint.layout import policy_folder
from slipstream.cli import main
from slipstream.errors import CheckpointError, ConfigError, EngineError
from tests.run.helpers import write_reward


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("")
    return folder


def test_without_a_head_there_is_none_to_leave_as_it_is() -> None:
    assert list(arms_of(None)) == [PLAIN, COTRAINED]
    arms = arms_of(Path("draft"))
    assert list(arms) == [PLAIN, FROZEN, COTRAINED]
    assert "speculative.enable=false" in arms[PLAIN]
    assert "speculative.train.enable_drafter_training=false" in arms[FROZEN]
    # Nobody is there to take a core that decoding would leave.
    lending = "actor_rollout_ref.rollout.one_thread_below=0"
    assert [lending in arms[name] for name in (PLAIN, FROZEN, COTRAINED)] == [True, True, False]
    assert "speculative.train.enable_drafter_training=true" in arms[COTRAINED]
    assert "speculative.eagle.spec_model_path=draft" in arms[COTRAINED]
    wide = arms_of(Path("draft"), trees=True)
    assert list(wide) == [*arms, CHAINS]
    assert wide[CHAINS][: len(arms[COTRAINED])] == arms[COTRAINED]
    assert "speculative.eagle.spec_topk=1" in wide[CHAINS]


def outcome_of(first: dict[str, list[int]]) -> RunOutcome:
    return RunOutcome(steps=[], responses="", weights="", first=first)


def test_how_often_responses_part() -> None:
    plain = outcome_of({"a": [1, 2, 3, 4], "b": [5, 6], "c": [7] * 10})
    assert parted(plain, plain) == 0
    # One at its third token, after which nothing is compared; one has gone on for longer.
    other = outcome_of({"a": [1, 2, 9, 9], "b": [5, 6, 7], "c": [7] * 10})
    assert parted(other, plain) == 2 / (3 + 3 + 10)
    assert parted(plain, other) == 2 / (3 + 3 + 10)
    with pytest.raises(EngineError, match="other samples"):
        parted(outcome_of({"a": [1]}), plain)


@pytest.mark.parametrize(
    ("device", "identical", "share", "good"),
    [
        ("cpu", 1.0, 0.0, True),
        ("cpu", 0.0, 0.001, False),
        ("cuda", 0.0, 0.001, True),
        ("cuda", 0.0, 0.2, False),
    ],
)
def test_what_is_good_enough(
    device: str, identical: float, share: float, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "identical": identical,
        PARTED: share,
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
    assert _say_ab([row]) is good
    assert ("NOT identical" in capsys.readouterr().out) is (device == "cpu" and not good)


def test_where_trees_are_allowed_chains_run_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = a_run(tmp_path / "run")
    (policy / "draft").mkdir()
    seconds = {PLAIN: 4.0, FROZEN: 2.0, COTRAINED: 1.0, CHAINS: 1.5}

    def outcome(folder: Path) -> RunOutcome:
        step = {"timing_s/step": 9.0, "timing_s/gen": seconds[folder.name]}
        return RunOutcome(steps=[step], responses="same", weights="same")

    monkeypatch.setattr(ab, "run_in_turns", lambda lines, say, lib: None)
    monkeypatch.setattr(ab, "read_outcome", outcome)
    monkeypatch.setattr(ab, "nats_moved", lambda first, last, rollouts, device: 0.25)
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


def test_settings_of_all_runs_come_before_those_of_one(tmp_path: Path) -> None:
    bench = AbBench(policy=a_run(tmp_path), steps=3, settings=("trainer.seed=7",))
    line = command(bench, Path("start"), ["speculative.enable=true"], Path("target"))
    assert line[-2 - len(SETTINGS) :] == ["trainer.seed=7", "speculative.enable=true", *SETTINGS]
    assert "trainer.total_training_steps=3" in line
    assert "actor_rollout_ref.model.path=start" in line
    assert "trainer.default_local_dir=target" in line
    steps = command(AbBench(policy=tmp_path), Path("start"), [], Path("target"))
    assert not any("total_training_steps" in text for text in steps)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`make quickstart` makes"):
        AbBench(policy=tmp_path)


@pytest.mark.parametrize("flags", [["--steps", "3"], ["--set", "a=b"], ["--policy", "runs/x"]])
def test_flags_of_whole_runs_need_one(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *flags]) == 2
    assert "give --ab speculation" in capsys.readouterr().err


def written(folder: Path, *, response: str = "a", weight: bytes = b"w", steps: int = 2) -> Path:
    """The folder of a run as `slipstream rl` leaves it, as far as it is read."""
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


def test_a_run_is_its_seconds_and_what_it_wrote(tmp_path: Path) -> None:
    one = read_outcome(written(tmp_path / "one"))
    assert (one.seconds("step"), one.seconds("gen"), one.seconds("drafter")) == (6.0, 2.0, 0.0)
    assert one.values("spec/accept_length") == [4.0, 5.0]
    assert one.first == {"p/1/0": [97]}
    assert identical([one, read_outcome(written(tmp_path / "same"))])
    other_text = read_outcome(written(tmp_path / "text", response="b"))
    other_weight = read_outcome(written(tmp_path / "weight", weight=b"v"))
    assert not identical([one, other_text])
    assert not identical([one, other_weight])


def test_a_run_without_its_rollouts_is_no_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "one")
    (folder / "rollouts" / "2.jsonl").unlink()
    with pytest.raises(CheckpointError, match="2 RL steps and 1 files of rollouts"):
        read_outcome(folder)


def test_rows_hold_one_run_against_the_other(
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

    monkeypatch.setattr(ab, "run_in_turns", lambda lines, say, lib: None)
    monkeypatch.setattr(ab, "read_outcome", outcome)
    computed_on: list[str] = []

    def moved(first: Path, last: Path, rollouts: Path, device: torch.device) -> float:
        computed_on.append(device.type)
        return 0.25

    monkeypatch.setattr(ab, "nats_moved", moved)
    monkeypatch.setattr(ab, "policy_folder", lambda folder: folder)
    monkeypatch.setattr(ab, "last_rollouts", lambda folder: folder)
    rows = ab.run(AbBench(policy=policy), lambda text: None)
    assert ran == [PLAIN, FROZEN, COTRAINED]
    assert summary(rows) == {
        "identical": True,
        "rollout_speedup": {FROZEN: 2.0, COTRAINED: 4.0},
        "step_speedup": {FROZEN: 1.2, COTRAINED: 12 / 9},
        "accept_length_over_frozen": 0.25,
        PARTED: 0.0,
    }
    assert [row.settings[ab.ACCEPT_CURVE] for row in rows] == ["", "2.00", "2.50"]
    assert rows[1].values["share_gen"] == 0.2
    assert rows[1].values["nats_moved"] == 0.25
    # In the second round one of the runs ends elsewhere.
    rows = ab.run(AbBench(policy=policy, rounds=2), lambda text: None)
    assert summary(rows)["identical"] is False
    # Once for all rounds, and where the runs were.
    monkeypatch.setattr(ab, "device_of", lambda config: torch.device("cuda"))
    ab.run(AbBench(policy=policy), lambda text: None)
    assert computed_on == ["cpu", "cpu", "cuda"]


def test_a_curve_is_of_parts_as_equal_as_can_be() -> None:
    assert curve([]) == []
    assert curve([3.0, 4.0]) == [3.0, 4.0]
    assert curve([1.0, 2.0, 3.0, 6.0, 9.0], points=2) == [1.5, 6.0]


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    policy = a_run(tmp_path)
    said: list[str] = []
    # The folder has no prompts to begin with.
    with pytest.raises(EngineError, match="ended with status"):
        ab.run(AbBench(policy=policy), said.append)
    assert "rl has no prompts" in said[-1]
    # What no run would take is said before the first one.
    (policy / "config.yaml").write_text("data:\n  tusk: countdown\n")
    with pytest.raises(ConfigError, match=r"data\.tusk"):
        ab.run(AbBench(policy=policy), said.append)


def test_three_runs_from_one_start_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Otherwise nothing is learned, and weights that stay are the same in any case.
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
    assert 0 < plain["values"]["nats_moved"] < 1
    began = hashlib.sha256((policy_folder(run / "sft") / "model.safetensors").read_bytes())
    assert began.hexdigest() != plain["settings"]["weights_sha256"]
    assert plain["values"]["share_drafter"] == frozen["values"]["share_drafter"] == 0
    assert cotrained["values"]["share_drafter"] > 0
