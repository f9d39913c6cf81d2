"""Seconds of a batch's tail and of the wait for rewards, with a fake clock."""

from __future__ import annotations

from contextlib import ExitStack

from slipstream.rollout.occupancy import Occupancy


def test_tail_counts_time_with_fewer_than_half_of_the_maximum() -> None:
    now = 100.0
    occupancy = Occupancy(lambda: now)
    responses = [ExitStack() for _ in range(5)]
    for response in responses:
        response.enter_context(occupancy.one())
        now += 1.0
    # Five, four, three, two, one, and then no running responses.
    for seconds, response in zip((2.0, 4.0, 8.0, 16.0, 32.0), responses, strict=True):
        now += seconds
        response.close()
    now += 64.0
    occupancy.finish()
    assert occupancy.tail_seconds == 16.0 + 32.0
    assert occupancy.empty_seconds == 64.0


def test_half_of_the_maximum_is_no_tail() -> None:
    now = 0.0
    occupancy = Occupancy(lambda: now)
    now += 7.0  # nothing has started
    for seconds in (1.0, 2.0):
        with occupancy.one():
            now += seconds
        now += 10.0
    with occupancy.one():
        with occupancy.one():
            now += 1.0
        now += 5.0
    occupancy.finish()
    assert occupancy.tail_seconds == 0.0
    assert occupancy.empty_seconds == 20.0


def test_the_wait_for_tools_is_told_apart_from_the_wait_for_rewards() -> None:
    now = 0.0
    occupancy = Occupancy(lambda: now)
    with occupancy.episode():
        now += 1.0  # nothing was generated yet
        with occupancy.one():
            now += 2.0
        now += 4.0  # its tool works
        with occupancy.one():
            now += 8.0
    now += 16.0
    occupancy.finish()
    assert occupancy.tool_seconds == 4.0
    assert occupancy.empty_seconds == 16.0
