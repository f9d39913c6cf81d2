"""The quickstart with a tiny model: every stage runs, and the summary has its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.state import huggingface_folder
from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics.loggers import read_jsonl
from slipstream.run import quickstart
from slipstream.run.folder import locked


def test_quickstart_runs_all_stages_and_writes_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "PROBLEMS", 12)
    output = tmp_path / "run"
    assert quickstart.main(output, seed=3, recipe="tiny", sft_control=True, bf16=False) == 0
    shown = capsys.readouterr().out
    for text in ("after SFT", "after more SFT", "after RL", "12 held-out problems", "summary.json"):
        assert text in shown
    summary = json.loads((output / quickstart.SUMMARY).read_text())
    assert (summary["recipe"], summary["dtype"], summary["seed"]) == ("tiny", "float32", 3)
    assert summary["problems"] == 12
    assert summary["steps"] == {"sft": 2, "rl": 2}
    assert summary["rollout_log_probs_differing"] == 0
    assert summary["tokens_per_second_rollout"] > 0
    phases = {"sft", "draft", "evaluate", "rl", "sft_control", "compare", "total"}
    assert summary["seconds"].keys() == phases
    assert summary["tokens_identical"] is True
    assert summary["accept_length"] >= 1
    together, few = summary["rollout_comparison"]
    # The number of responses in an RL step.
    assert (together["responses"], together["at_once"]) == (64, 4)
    assert (few["responses"], few["at_once"]) == (16, 4)
    assert 0 < few["tokens"] < together["tokens"]
    assert summary["rollout_speedup"] == together["speedup"]
    for pair in (together, few):
        assert pair["speedup_low"] <= pair["speedup"] <= pair["speedup_high"]
        assert 0 < pair["noise_low"] <= pair["noise_high"]
        assert min(pair["plain_seconds"], pair["speculative_seconds"]) > 0
    text = " ".join(shown.split())
    for part in (
        "64 responses, 4 at a time: plain",
        "drafts in RL:",
        "16 responses, 4 at a time: plain",
        "identical yes",
    ):
        assert part in text
    assert "Speculative decoding enabled: draft head" in shown
    gain, low, high = summary["accuracy_ci"]["rl_minus_sft"]
    assert gain == pytest.approx(summary["accuracy_rl"] - summary["accuracy_sft"])
    assert low <= gain <= high
    assert summary["accuracy_ci"]["rl_minus_sft_continued"][0] == pytest.approx(
        summary["accuracy_rl"] - summary["accuracy_sft_continued"]
    )
    assert summary["accuracy_ci"].keys() >= {"after SFT", "after more SFT", "after RL"}
    assert (output / "run.png").read_bytes().startswith(b"\x89PNG")


def test_speculation_changes_neither_rollouts_nor_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "PROBLEMS", 4)
    # Not COST: in such a short run, the cost model may never choose to draft.
    always = [*quickstart.SPECULATION, "speculative.eagle.tune_algorithm=PREDEFINED"]
    monkeypatch.setattr(quickstart, "SPECULATION", always)
    results = []
    for name, speculation in (("on", True), ("off", False)):
        output = tmp_path / name
        assert (
            quickstart.main(
                output,
                seed=2,
                recipe="tiny",
                sft_control=False,
                bf16=False,
                speculation=speculation,
            )
            == 0
        )
        summary = json.loads((output / quickstart.SUMMARY).read_text())
        assert ("rollout_speedup" in summary) == speculation
        policy = huggingface_folder(output / "global_step_2")
        weights = (policy / "model.safetensors").read_bytes()
        rollouts = [(output / "rollouts" / f"{step}.jsonl").read_bytes() for step in (1, 2)]
        results.append((summary["accuracy_rl"], summary["tokens"]["rl_sampled"], weights, rollouts))
    assert results[0] == results[1]
    steps = [metrics for _, metrics in read_jsonl(tmp_path / "on" / "metrics.jsonl")]
    assert max(metrics.get("spec/on_fraction", 0.0) for metrics in steps) > 0


def test_cold_start_trains_a_new_head_in_rl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "PROBLEMS", 4)
    always = [*quickstart.COLD_START, "speculative.eagle.tune_algorithm=PREDEFINED"]
    every = "speculative.train.training_interval_steps=1"
    monkeypatch.setattr(quickstart, "COLD_START", [*always, every])
    output = tmp_path / "run"
    given: dict[str, Any] = {"seed": 2, "recipe": "tiny", "sft_control": False, "bf16": False}
    assert quickstart.main(output, **given, cold_start=True) == 0
    shown = capsys.readouterr().out
    assert not (output / quickstart.DRAFT).exists()
    summary = json.loads((output / quickstart.SUMMARY).read_text())
    assert "draft" not in summary["seconds"]
    drafts = summary["drafts"]
    assert drafts["updates"] > 0
    assert drafts["versions"] + drafts["hold_backs"] == 2
    assert "drafts in RL:" in shown
    assert f"{drafts['versions']:.0f} versions published" in " ".join(shown.split())
    with pytest.raises(ConfigError, match="--no-speculation disables it"):
        quickstart.main(output, **given, cold_start=True, speculation=False)


def test_the_agent_learns_to_use_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "PROBLEMS", 16)
    small = (
        "sft.total_training_steps=40",
        "sft.batch_tokens=1024",
        "data.max_response_length=96",
        "data.train_batch_size=2",
        "data.val_size=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
    )
    monkeypatch.setattr(quickstart, "SPECULATION", [*quickstart.SPECULATION, *small])
    every = "speculative.train.training_interval_steps=1"
    monkeypatch.setattr(quickstart, "COLD_START", [*quickstart.COLD_START, every])
    output = tmp_path / "run"
    given: dict[str, Any] = {"seed": 2, "sft_control": False, "bf16": False, "agent": True}
    assert quickstart.main(output, recipe="auto", **given) == 0
    summary = json.loads((output / quickstart.SUMMARY).read_text())
    assert summary["recipe"] == quickstart.AGENT_RECIPE
    assert summary["rollout_log_probs_differing"] == 0
    assert summary["tokens_identical"] is True
    assert "draft" not in summary["seconds"]
    turns = [one["turns"] for one in summary["evaluation"].values()]
    assert len(turns) == 2
    assert min(turns) > 1
    shown = capsys.readouterr().out
    for text in ("turns", "    policy  ", "    tool    ", "--recipe quickstart_agent"):
        assert text in shown
    with pytest.raises(ConfigError, match="--recipe=quickstart"):
        quickstart.main(output, recipe="quickstart", **given)


def test_drafts_summary_is_computed_from_the_metrics() -> None:
    def step(accepted: float, by_head: float, **more: float) -> dict[str, float]:
        names = ("spec/on_fraction", "spec/accept_length", "spec/head_fraction")
        return dict(zip(names, (0.5, accepted, by_head), strict=True)) | more

    history = [
        (1, step(1.0, 0.0)),
        (2, step(1.5, 0.4, **{"timing_s/drafter": 2.0})),
        (3, step(2.0, 0.9)),
        (4, {"spec/on_fraction": 0.0}),
        (5, step(3.0, 0.8, **{"timing_s/drafter": 1.0, "drafter/version": 2})),
        (6, {"val-core/countdown/acc/mean@1": 0.5}),
    ]
    found = quickstart.drafts_summary(history)["drafts"]
    assert (found["accept_length_first"], found["accept_length_last"]) == (1.0, 3.0)
    # Steps without drafts are not counted.
    assert found["steps"] == 4
    assert (found["head_from_step"], found["head_share_last"]) == (3, 0.8)
    assert (found["versions"], found["seconds"]) == (2, 3.0)
    assert quickstart.drafts_summary(history[-1:]) == {}
    rested = [*history[:2], *((n, {"spec/on_fraction": 0.0}) for n in range(3, 40))]
    found = quickstart.drafts_summary(rested)["drafts"]
    assert (found["steps"], found["accept_length_last"]) == (2, 1.25)
    assert "; 37 of 39 steps had no drafts" in quickstart._of_drafts(found, 39)
    none = quickstart.drafts_summary(rested[2:])["drafts"]
    assert quickstart._of_drafts(none, 37).startswith("drafts in RL: none in 37 steps;")
    # In one of twenty steps most accepted drafts come from history. The summary averages over two
    # steps.
    lucky = [(n, step(2.0, 0.4 if n == 12 else 0.9)) for n in range(1, 21)]
    assert quickstart.drafts_summary(lucky)["drafts"]["head_from_step"] == 1


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError, match="another run is using"):
        quickstart.main(tmp_path, seed=1, recipe="tiny", sft_control=False, bf16=False)


@pytest.mark.parametrize(
    ("units", "asked", "rate", "recipe", "dtype"),
    [
        (True, True, 1000.0, "quickstart", "bfloat16"),
        (True, True, 100.0, "quickstart_small", "bfloat16"),
        (True, False, 100.0, "quickstart_small", "float32"),
        (False, True, 100.0, "quickstart_small", "float32"),
    ],
)
def test_recipe_and_dtype_follow_the_measured_cpu_speed(
    monkeypatch: pytest.MonkeyPatch, units: bool, asked: bool, rate: float, recipe: str, dtype: str
) -> None:
    measured: list[torch.dtype] = []

    def matmul_rate(kind: torch.dtype) -> float:
        measured.append(kind)
        return rate

    monkeypatch.setattr(quickstart, "cpu_has_bf16_units", lambda: units)
    monkeypatch.setattr(quickstart, "matmul_rate", matmul_rate)
    chosen, name, reason = quickstart.choose_recipe("auto", bf16=asked)
    assert (chosen, name) == (recipe, dtype)
    assert measured == [getattr(torch, dtype)]
    assert f"{rate:.0f} GFLOP/s in {dtype}" in reason
    assert ("switched off" in reason) == (not asked)
    assert ("no bf16 units" in reason) == (asked and not units)
    assert quickstart.choose_recipe("quickstart", bf16=asked)[0] == "quickstart"
