"""Timers accumulate seconds by name, measured with a fake clock."""

from __future__ import annotations

import pytest

from slipstream.metrics.timers import IdleCores, Timers, step_split, timing_per_token


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_spans_accumulate_nest_and_reset_on_collect() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers.span("step"):
        for seconds in (1.0, 2.0):
            with timers.span("gen"):
                clock.now += seconds
        clock.now += 0.5
    timers.add("sync", 0.25)
    assert timers.collect() == {"timing_s/gen": 3.0, "timing_s/step": 3.5, "timing_s/sync": 0.25}
    assert timers.collect() == {}


def test_a_span_counts_if_its_body_raises() -> None:
    clock = Clock()
    timers = Timers(clock)

    def fail() -> None:
        clock.now += 2.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), timers.span("gen"):
        fail()
    assert timers.collect() == {"timing_s/gen": 2.0}


def test_step_split_adds_up_to_the_step() -> None:
    timers = Timers(lambda: 0.0)
    seconds = {"step": 10.0, "gen": 6.0, "update_actor": 1.5, "drafter": 0.5, "testing": 30.0}
    for name, value in seconds.items():
        timers.add(name, value)
    timers.move(2.0, "gen", "reward")
    split = step_split(timers.collect())
    assert split.pop("timing_s/other") == 2.0
    assert split == {
        "timing_s/step": 10.0,
        "timing_s/gen": 4.0,
        "timing_s/reward": 2.0,
        "timing_s/update_actor": 1.5,
        "timing_s/drafter": 0.5,
        "timing_s/testing": 30.0,
    }


def test_timing_per_token_is_in_milliseconds() -> None:
    timings = {"timing_s/gen": 3.0, "timing_s/reward": 1.0}
    tokens = {"gen": 1500, "update_actor": 10, "reward": 0}
    assert timing_per_token(timings, tokens) == {"timing_per_token_ms/gen": 2.0}


def test_idle_cores_measures_unused_core_seconds() -> None:
    times, used = iter([10.0, 14.0, 20.0, 21.0]), iter([1.0, 6.0, 6.0, 9.0])
    idle = IdleCores(2, lambda: next(times), lambda: next(used))
    with idle.watched():
        pass
    assert idle.seconds == 3.0
    # The two clocks may disagree, but the result is never negative.
    with idle.watched():
        pass
    assert idle.seconds == 0.0
