"""The engine's counters, and `EngineStats` made from them."""

from __future__ import annotations

from dataclasses import fields

from slipstream.inference.engine.counters import Counters
from slipstream.inference.protocol import EngineStats
from slipstream.inference.speculation.plan import OFF, DraftPlan


def test_every_counter_reaches_the_stats() -> None:
    numbers = [
        f.name for f in fields(Counters) if isinstance(getattr(Counters(), f.name), int | float)
    ]
    counters = Counters(**{name: i for i, name in enumerate(numbers, start=1)})  # type: ignore[arg-type]
    stats = counters.stats(version=101, running=102, waiting=103, kv_bytes=104)
    assert {name: getattr(stats, name) for name in numbers} == {
        name: i for i, name in enumerate(numbers, start=1)
    }
    assert (stats.version, stats.running, stats.waiting, stats.kv_bytes) == (101, 102, 103, 104)
    now = {"version", "running", "waiting", "kv_bytes"}
    servers = {"server_share", "server_difference", "server_checks", "update_seconds"}
    names = {f.name for f in fields(EngineStats)}
    assert names == {f.name for f in fields(Counters)} | now | servers


def test_new_counters_give_default_stats() -> None:
    empty = Counters().stats(version=0, running=0, waiting=0, kv_bytes=0)
    assert empty == EngineStats(plan="off")


def test_decode_steps_are_counted_by_batch_class() -> None:
    counters = Counters()
    counters.decoded(1, 3, 0.5)
    counters.decoded(4, 4, 1.0)
    counters.decoded(2, 5, 0.25)
    assert (counters.decode_steps, counters.decode_tokens, counters.decode_seconds) == (3, 12, 1.75)
    assert counters.max_batch == 4
    assert counters.batch_tokens == [3, 9, 0, 0, 0]
    assert counters.batch_seconds == [0.5, 1.25, 0.0, 0.0, 0.0]


def test_drafts_are_counted_by_depth_and_plan() -> None:
    counters, tree = Counters(), DraftPlan(3, 2, 8)
    counters.planned(tree, 5, 0.5)
    counters.drafted(tree, [7, 0, 4], by_head=6, seconds=0.5, proposing=0.125)
    counters.verified(3, 2)
    counters.verified(40, 0)
    counters.planned(OFF, 5, 0.25)
    counters.planned(OFF, 6, 0.5)
    stats = counters.stats(version=0, running=0, waiting=0, kv_bytes=0)
    assert (stats.draft_tokens, stats.head_draft_tokens, stats.verifications) == (11, 6, 2)
    assert (stats.draft_steps, stats.draft_depth) == (1, 3)
    assert (stats.draft_seconds, stats.propose_seconds) == (0.5, 0.125)
    # Each entry counts its depth or more. The last entry is depth 16.
    assert stats.offered_depths == (2, 2, 2, *[1] * 13)
    assert stats.accepted_depths == (1, 1, *[0] * 14)
    assert stats.plan == "off"
    assert stats.plan_seconds == {(2, "3_2_8"): 0.5, (2, "off"): 0.75}
