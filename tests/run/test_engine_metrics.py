"""Metrics of speculation and of generation time, computed from the counters of an engine."""

from __future__ import annotations

import pytest

from slipstream.inference.protocol import EngineStats
from slipstream.inference.servers.check import Verdict
from slipstream.metrics.names import check_names
from slipstream.run.engine_metrics import (
    VERDICTS,
    server_metrics,
    speculation_metrics,
    time_metrics,
)


def test_speculation_metrics_are_differences_of_counters() -> None:
    before = EngineStats(
        decode_seconds=1.0,
        draft_seconds=0.5,
        verifications=10,
        accepted_tokens=5,
        draft_steps=4,
        draft_depth=8,
        draft_tokens=20,
        head_draft_tokens=20,
        batch_tokens=(10, 0, 0, 0, 5),
        batch_seconds=(1.0, 0.0, 0.0, 0.0, 0.5),
        plan_seconds={(0, "off"): 0.5, (0, "3_1_4"): 0.5},
        offered_depths=(10, 5, *(0,) * 14),
        accepted_depths=(4, 1, *(0,) * 14),
    )
    now = EngineStats(
        decode_seconds=3.0,
        decode_steps=10,
        recess_steps=4,
        draft_seconds=1.0,
        verifications=30,
        accepted_tokens=35,
        draft_steps=8,
        draft_depth=22,
        draft_tokens=60,
        head_draft_tokens=30,
        batch_tokens=(30, 8, 0, 0, 5),
        batch_seconds=(2.0, 4.0, 0.0, 0.0, 0.5),
        plan_seconds={(0, "off"): 0.5, (0, "3_1_4"): 1.5, (1, "off"): 4.0},
        offered_depths=(30, 15, *(0,) * 14),
        accepted_depths=(24, 6, *(0,) * 14),
    )
    metrics = speculation_metrics(before, now)
    assert metrics == pytest.approx(
        {
            "spec/on_fraction": 0.25,
            "spec/recess_fraction": 0.4,
            "spec/accept_length": 2.5,
            "spec/head_fraction": 0.25,
            "spec/plan": 3.5,
            "spec/tokens_per_second/bs_1": 20.0,
            "spec/tokens_per_second/bs_4": 2.0,
            "spec/acceptance_rate_1": 1.0,
            "spec/acceptance_rate_2": 0.5,
            "spec/plan_seconds/bs_1/3_1_4": 1.0,
            "spec/plan_seconds/bs_4/off": 4.0,
        }
    )
    check_names(metrics)
    assert speculation_metrics(now, now) == {}
    assert now.accept_length == pytest.approx(1 + 35 / 30)
    assert EngineStats().accept_length == 1


def test_generation_time_is_split_by_activity() -> None:
    before = EngineStats(prefill_seconds=1.0, decode_seconds=2.0, draft_seconds=1.0)
    now = EngineStats(
        prefill_seconds=1.5, decode_seconds=6.0, draft_seconds=3.0, propose_seconds=0.75
    )
    times = time_metrics(before, now)
    assert times == pytest.approx(
        {
            "timing_s/gen/prefill": 0.5,
            "timing_s/gen/decode": 2.0,
            "timing_s/gen/draft": 0.75,
            "timing_s/gen/verify": 1.25,
        }
    )
    check_names(times)
    plain = time_metrics(before, EngineStats(decode_seconds=2.5, draft_seconds=1.0))
    assert plain.keys() == {"timing_s/gen/prefill", "timing_s/gen/decode"}
    # An engine that measures no times has no such metrics.
    assert time_metrics(EngineStats(), EngineStats(generated_tokens=5)) == {}


def test_engine_without_drafts_has_no_speculation_metrics() -> None:
    now = EngineStats(decode_seconds=1.0, decode_steps=4, batch_tokens=(4, 0, 0, 0, 0))
    assert speculation_metrics(EngineStats(), now) == {}


def test_servers_count_drafts_and_measure_no_time() -> None:
    now = EngineStats(
        verifications=20,
        accepted_tokens=30,
        draft_tokens=60,
        head_draft_tokens=60,
        draft_steps=20,
        draft_depth=60,
        offered_depths=(20, 20, 20, *(0,) * 13),
        accepted_depths=(15, 10, 5, *(0,) * 13),
    )
    metrics = speculation_metrics(EngineStats(), now)
    check_names(metrics)
    assert metrics == {
        "spec/accept_length": 2.5,
        "spec/head_fraction": 1.0,
        "spec/plan": 3.0,
        "spec/acceptance_rate_1": 0.75,
        "spec/acceptance_rate_2": 0.5,
        "spec/acceptance_rate_3": 0.25,
    }


def test_server_metrics_are_those_of_the_checks_since_the_last_step() -> None:
    before = EngineStats(
        update_seconds={"write": 1.0, "install": 2.0},
        server_checks={"new": 3, "old": 1},
        server_share=0.5,
        server_difference=0.1,
    )
    now = EngineStats(
        update_seconds={"write": 1.5, "install": 4.0, "check": 0.25},
        server_checks={"new": 4, "old": 1, "undecided": 2},
        server_share=0.9,
        server_difference=0.01,
    )
    metrics = server_metrics(before, now)
    assert metrics == pytest.approx(
        {
            "timing_s/sync/write": 0.5,
            "timing_s/sync/install": 2.0,
            "timing_s/sync/check": 0.25,
            "server/checks/new": 1,
            "server/checks/old": 0,
            "server/checks/wrong": 0,
            "server/checks/undecided": 2,
            "server/share": 0.9,
            "server/difference": 0.01,
        }
    )
    check_names(metrics)
    # Nothing was checked since then, so the values are not those of this step.
    assert server_metrics(now, now) == {}
    first = EngineStats(server_checks={"new": 1}, server_difference=0.02)
    metrics = server_metrics(EngineStats(), first)
    assert (metrics["server/checks/new"], metrics["server/difference"]) == (1, 0.02)
    assert "server/share" not in metrics
    assert {*VERDICTS} == {*Verdict}
