"""Speculation's metrics from counters."""

from __future__ import annotations

import pytest

from slipstream.inference.protocol import EngineStats
from slipstream.loops.engine_watch import speculation_metrics
from slipstream.metrics.names import check_names


def test_metrics_are_differences_of_counters() -> None:
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
        }
    )
    check_names(metrics)
    assert speculation_metrics(now, now) == {}
    assert now.accept_length == pytest.approx(1 + 35 / 30)
    assert EngineStats().accept_length == 1
