"""Checkpoints that are written in the background: order, errors, deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import pytest

from slipstream.deadlines import Deadlines
from slipstream.errors import CheckpointError, StageTimeoutError
from slipstream.run.async_checkpoint import AsyncCheckpoints

GoOn = Callable[[], None]


def saves(timeout_s: float = 60.0) -> tuple[AsyncCheckpoints, list[str]]:
    said: list[str] = []
    return AsyncCheckpoints(Deadlines(timeout_s=timeout_s), said.append), said


def test_training_continues_during_a_save_and_the_next_save_waits_for_it() -> None:
    made, _ = saves()
    happened: list[str] = []
    written = threading.Event()

    def first(go_on: GoOn) -> None:
        happened.append("first lets go")
        go_on()
        assert written.wait(60)
        happened.append("first ends")

    def second(go_on: GoOn) -> None:
        happened.append("second begins")

    async def run() -> None:
        await made.begin(first)
        happened.append("training goes on")
        made.check()
        threading.Timer(0.05, written.set).start()
        await made.begin(second)
        await made.finish()

    anyio.run(run)
    assert happened == ["first lets go", "training goes on", "first ends", "second begins"]


def test_error_before_training_continues_is_raised_at_once() -> None:
    def fail(go_on: GoOn) -> None:
        raise CheckpointError("disk full")

    async def run() -> None:
        made, _ = saves()
        with pytest.raises(CheckpointError, match="disk full"):
            await made.begin(fail)
        await made.finish()

    anyio.run(run)


@pytest.mark.parametrize("seen_by", ["check", "begin", "finish"])
def test_background_error_is_raised_once_by_the_next_call(seen_by: str) -> None:
    failed, saved_again = threading.Event(), list[bool]()

    def fail(go_on: GoOn) -> None:
        go_on()
        assert failed.wait(60)
        raise CheckpointError("disk full")

    async def run() -> None:
        made, _ = saves()
        await made.begin(fail)
        made.check()
        failed.set()
        with pytest.raises(CheckpointError, match="disk full"):
            await see(made)
        await made.finish()

    async def see(made: AsyncCheckpoints) -> None:
        if seen_by == "begin":
            await made.begin(lambda go_on: saved_again.append(True))
        elif seen_by == "finish":
            await made.finish()
        else:
            with anyio.fail_after(60):
                while True:
                    made.check()
                    await anyio.sleep(0.001)

    anyio.run(run)
    assert not saved_again


def test_give_up_waits_for_the_save_and_reports_its_error() -> None:
    failed = threading.Event()

    def fail(go_on: GoOn) -> None:
        go_on()
        assert failed.wait(60)
        raise CheckpointError("disk full")

    async def run() -> None:
        made, said = saves()
        await made.begin(fail)
        threading.Timer(0.05, failed.set).start()
        await made.give_up()
        assert said == ["the last checkpoint was not written either: disk full"]

    anyio.run(run)


def test_save_that_hangs_is_awaited_only_once() -> None:
    never = threading.Event()

    def hang(go_on: GoOn) -> None:
        go_on()
        never.wait()

    async def run() -> None:
        made, said = saves(timeout_s=0.05)
        await made.begin(hang)
        with pytest.raises(StageTimeoutError, match="writing it to disk was not done"):
            await made.finish()
        await made.give_up()
        assert said == []

    anyio.run(run)
    never.set()
