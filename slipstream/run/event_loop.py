"""Runs the coroutine of a loop, so that a second Ctrl-C ends it without a traceback.

The second Ctrl-C cancels the tasks (`checkpoint.interrupt`). A third one raises KeyboardInterrupt
in some task. The event loop re-raises it, and while closing reports it again for each parent task;
this module suppresses those reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def run_async(work: Callable[..., Awaitable[T]], *args: object) -> T:
    """Run `work(*args)` in a new event loop and return its result.

    Raises KeyboardInterrupt if its tasks were cancelled.
    """
    try:
        return anyio.run(_quietly, work, args)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _quietly(work: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
    asyncio.get_running_loop().set_exception_handler(_report)
    return await work(*args)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not _only_interrupts(context.get("exception")):
        loop.default_exception_handler(context)


def _only_interrupts(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_only_interrupts(part) for part in error.exceptions)
    return isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
