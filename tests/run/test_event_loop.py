"""`run_async`: Ctrl-C and background errors in the coroutine of a loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import anyio
import pytest

from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.run.event_loop import run_async


async def group_with(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    async def group() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group)


def test_ctrl_c_in_a_task_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run_async(group_with, KeyboardInterrupt())
    assert caplog.records == []


def test_other_background_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def leave(error: BaseException) -> int:
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "left behind", "exception": error})
        return 3

    assert run_async(leave, ValueError("wrong")) == 3
    assert [record.message.splitlines()[0] for record in caplog.records] == ["left behind"]


def test_ctrl_c_in_an_event_loop_callback_is_raised(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    def callback() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append("callback")

    async def work() -> None:
        asyncio.get_running_loop().call_soon(callback)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
        ended.append("work")

    with GracefulInterrupt(), caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        run_async(work)
    assert ended == ["callback"]
    assert caplog.records == []


def test_third_ctrl_c_does_not_wait_for_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()

    with GracefulInterrupt(), pytest.raises(KeyboardInterrupt):
        run_async(work)
