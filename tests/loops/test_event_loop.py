"""A coroutine of a loop, run from the command line."""

from __future__ import annotations

import asyncio
import logging

import anyio
import pytest

from slipstream.loops.event_loop import run_async


async def group_with(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    async def group() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group)


def test_ctrl_c_in_a_task_is_raised_and_reported_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run_async(group_with, KeyboardInterrupt())
    assert caplog.records == []


def test_other_failures_in_the_background_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def leave(error: BaseException) -> int:
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "left behind", "exception": error})
        return 3

    assert run_async(leave, ValueError("wrong")) == 3
    assert [record.message.splitlines()[0] for record in caplog.records] == ["left behind"]
