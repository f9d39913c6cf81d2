"""The report page as a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.errors import DataError
from slipstream.report.page import page, payload, read_runs, write_report
from tests.report.run_folders import STEP, line, make_run, sample


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_command_writes_the_page_into_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "mine")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"report       {folder / 'report.html'} (0.")
    run = data_of((folder / "report.html").read_text())["runs"][0]
    assert run["tiles"] == [
        ["RL steps", "4 of 4", "finished"],
        ["Reward", "0.500 → 0.500", "mean of the first and last 1 steps"],
        ["Accuracy", "40.0 → 60.0 %", "countdown; 95 %: 55.0 to 65.0"],
        ["Rollouts", "25 %", "of the time of RL steps"],
        ["Rollout speed", "100", "tokens/s, median of the steps"],
        ["Accepted length", "3.50", "tokens per verification"],
        ["Log-probs that differ", "0", "rollout against trainer, all steps"],
    ]
    assert run["plans"] == {
        "plans": ["off", "3_1_4", "6_1_7"],
        "rows": [["1", [0.4, 0.0, 1.2]], ["2 to 4", [0.0, 1.2, 0.0]]],
    }
    assert run["ledger"]["wall"] == 30.0


def test_losses_are_counted_by_reason(tmp_path: Path) -> None:
    more = {
        2: {
            "rollout/num_dropped_groups": 3.0,
            "rollout/num_dropped_groups/zero_variance": 2.0,
            "rollout/num_dropped_groups/surplus": 1.0,
            "training/num_failed_rewards/no_answer_within_s": 4.0,
        },
        3: {
            "rollout/num_dropped_groups/zero_variance": 5.0,
            "training/skipped_batch": 1.0,
            "rollout/num_carried_over": 2.0,
            # Shares of the samples of the step.
            "rollout/num_samples": 64.0,
            "response/aborted_ratio": 3 / 64,
            # Shares of the trained samples: 64 without 4 failed and 2 lone ones.
            "training/num_failed_rewards": 4.0,
            "training/num_lone_samples": 2.0,
            "rollout_corr/rollout_is_veto_fraction": 6 / 58,
            "rollout_corr/rollout_rs_masked_fraction": 0.3,
            "rollout_corr/rollout_rs_seq_masked_fraction": 12 / 58,
            "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": 11 / 58,
            "val-aux/math/num_failed": 8.0,
        },
    }
    (run,) = read_runs([make_run(tmp_path, more=more)])
    assert payload([run])["runs"][0]["lost"] == [
        ["responses with tokens that the rollout correction rejected", 12],
        ["responses with tokens that the rollout correction rejected: token_k1", 11],
        ["validation samples failed: math", 8],
        ["groups dropped: zero variance", 7],
        ["responses vetoed by the rollout correction", 6],
        ["samples failed: no answer within s", 4],
        ["samples aborted", 3],
        ["samples carried over to a later step (not lost)", 2],
        ["samples dropped: all others of the group failed", 2],
        ["groups dropped: surplus", 1],
        ["steps without an update: nothing to train on", 1],
    ]


def test_text_of_a_run_cannot_end_the_script_element(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "{{DATA}}<b>")
    rows = folder / "rollouts" / "tokens" / "4.jsonl"
    rows.write_text(json.dumps(sample(4) | {"input": "</script><script>alert(1)</script>{{PLOT}}"}))
    rows.write_text(rows.read_text() + "\n")
    text = page(payload(read_runs([folder])))
    assert data_of(text)["runs"][0]["samples"][-1]["input"].startswith("</script>")
    assert text.count("</script>") == 3
    assert "<title>{{DATA}}&lt;b&gt; · Slipstream report</title>" in text


def test_non_finite_values_are_null(tmp_path: Path) -> None:
    folder = make_run(tmp_path, more={2: {"actor/grad_norm": math.inf}, 3: {"actor/grad_norm": 1}})
    text = (folder / "metrics.jsonl").read_text().replace("Infinity", '"Infinity"')
    (folder / "metrics.jsonl").write_text(text)
    charts = {c["id"]: c for c in data_of(page(payload(read_runs([folder]))))["charts"]}
    assert charts["grad_norm"]["lines"][0]["y"] == [None, 1.0]


def test_runs_with_equal_folder_names_get_unique_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    (second / "config.yaml").write_text(
        "trainer:\n  total_training_steps: 5\ndata: {task: gsm8k}\n"
    )
    output = tmp_path / "out" / "both.html"
    assert main(["report", str(first), str(second), "--output", str(output)]) == 0
    data = data_of(output.read_text())
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert data["differences"] == [
        ["trainer.total_training_steps", "4", "5"],
        ["trainer.rollout_data_dir", "null", "not set"],
        ["data.task", '"countdown"', '"gsm8k"'],
    ]
    assert f"report       {output}" in capsys.readouterr().out


def test_too_many_runs_and_unwritable_output_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with pytest.raises(DataError, match=r"9 runs .*give 8 or fewer"):
        read_runs([folder] * 9)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written to .*; set another --output"):
        write_report([folder], tmp_path / "file" / "report.html")


def test_a_page_of_1000_steps_is_below_one_megabyte(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    records = [
        line(step, 100.0 + step, {name: value * (1 + step / 7) for name, value in STEP.items()})
        for step in range(1, 1001)
    ]
    (folder / "metrics.jsonl").write_text("".join(records))
    assert write_report([folder], tmp_path / "report.html") == []
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
