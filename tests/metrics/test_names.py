"""The table of metrics covers all names, and the documentation page is generated from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.metrics.names import METRICS, check_names, deterministic, find, markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "actor/pg_loss",
        "critic/advantages/min",
        "response_length/p90",
        "num_turns/mean",
        "timing_s/save_checkpoint",
        "timing_per_token_ms/gen",
        "val-core/openai/gsm8k/acc/mean@1",
        "val-aux/countdown/acc/mean@16/ci_low",
        "val-aux/countdown/acc/best@4/mean",
        "reward/format/mean",
        "training/rollout_log_probs_bitwise_equal",
    ],
)
def test_known_names_are_accepted(name: str) -> None:
    check_names({name: 0.0})


@pytest.mark.parametrize(
    "name",
    [
        "actor/pg_los",
        "actor/pg_loss/x",
        "x/actor/pg_loss",
        "critic/score/median",
        "val-core/x/acc/mean@0",
        "val-core//acc/mean@1",
        "timing_s/",
    ],
)
def test_unknown_names_raise(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown metric names: {name}"):
        check_names({"actor/lr": 0.0, name: 0.0})


def test_a_typo_suggests_the_closest_name() -> None:
    with pytest.raises(ValueError, match=r"near actor/pg_los: actor/pg_loss"):
        check_names({"actor/pg_los": 0.0})


def test_rows_have_meanings_and_unique_names() -> None:
    assert all(metric.meaning for metric in METRICS)
    plain = [metric.name for metric in METRICS if "{" not in metric.name and "<" not in metric.name]
    assert len(plain) > 20
    for name in plain:
        assert [metric.name for metric in METRICS if metric.pattern.fullmatch(name)] == [name]


def test_deterministic_removes_wall_time_metrics_only() -> None:
    metrics = {
        "critic/score/mean": 0.5,
        "timing_s/gen": 1.0,
        "timing_s/step": 2.0,
        "timing_per_token_ms/update_actor": 2.0,
        "perf/throughput": 3.0,
        "perf/time_per_step": 3.0,
        "perf/cpu_memory_used_gb": 3.0,
        "perf/total_num_tokens": 100.0,
        "rollout/tokens_per_second": 4.0,
        "sft/tokens_per_second": 4.0,
        "sft/tokens": 7.0,
        "my/own": 1.5,
    }
    assert deterministic(metrics) == {
        "critic/score/mean": 0.5,
        "perf/total_num_tokens": 100.0,
        "sft/tokens": 7.0,
        "my/own": 1.5,
    }


def test_timings_are_marked_as_wall_time() -> None:
    for metric in METRICS:
        if metric.name.startswith("timing") or "per_second" in metric.name:
            assert metric.wall_time, metric.name
    row = find("timing_s/sync")
    assert row is not None
    assert row.unit == "s"


def test_documentation_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == markdown(), "run: python -m slipstream.metrics.names > docs/metrics.md"


def test_importing_metrics_imports_no_heavy_package() -> None:
    program = (
        "import sys\n"
        "import slipstream.metrics.names, slipstream.metrics.loggers, slipstream.metrics.timers\n"
        "import slipstream.metrics.batch_metrics, slipstream.metrics.picture\n"
        "print({'torch', 'matplotlib', 'tensorboard', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
