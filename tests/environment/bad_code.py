"""Tools and environments that behave badly, for `tests.environment.bad_input`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import anyio
import gymnasium

from slipstream.environment.protocol import Answer, Start, Turn
from slipstream.environment.tools.function import function_tool
from slipstream.types import Prompt


@function_tool
def good(x: int) -> int:
    """Add one.

    Args:
        x: A number.
    """
    return x + 1


@function_tool
def none() -> None:
    """Return nothing."""


@function_tool
def raw() -> bytes:
    """Return bytes that are not UTF-8."""
    return b"a\xff<|im_end|>"


@function_tool
def long() -> str:
    """Return 10 MB."""
    return "0123456789" * 1_000_000


@function_tool
async def later(x: int) -> int:
    """Add one, later.

    Args:
        x: A number.
    """
    await anyio.sleep(0.001)
    return x + 1


@function_tool
def fail() -> str:
    """Raise an exception."""
    raise LookupError("no such city")


class PanicException(BaseException):
    """As libraries in Rust raise it: no `Exception`."""


@function_tool
def panic() -> str:
    """Raise what is no `Exception`."""
    raise PanicException("index out of bounds")


@function_tool(timeout_s=0.1)
def hang() -> None:
    """Never return."""
    threading.Event().wait()


@function_tool(timeout_s=0.1)
async def hang_later() -> None:
    """Never return, in a coroutine."""
    await anyio.sleep_forever()


@function_tool
def leave() -> None:
    """Call sys.exit."""
    sys.exit(3)


@function_tool
def kill() -> None:
    """End the process."""
    os._exit(3)


@function_tool(bound=["seen"])
def spoil(items: list[int], seen: list[int]) -> int:
    """Change the arguments.

    Args:
        items: Numbers.
        seen: Numbers of the row.
    """
    items.append(99)
    seen.append(99)
    return len(items) + len(seen)


class Own:
    """An environment that never ends."""

    async def reset(self, row: Prompt, seed: int) -> Start:
        return Start()

    async def step(self, turn: Turn) -> Answer:
        await anyio.sleep(0.01)
        return Answer(messages=[{"role": "user", "content": "once more"}])

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return None


class Hangs(Own):
    """An environment that never answers."""

    async def step(self, turn: Turn) -> Answer:
        await anyio.sleep_forever()
        raise AssertionError


class Raises(Own):
    """An environment that crashes."""

    async def step(self, turn: Turn) -> Answer:
        raise LookupError("no such state")


class NotANumber(Own):
    """An environment whose reward is NaN."""

    async def step(self, turn: Turn) -> Answer:
        return Answer(rewards={"found": float("nan")}, done=True)


class Late(gymnasium.Env[str, str]):
    """An environment that answers after `close`."""

    answered = threading.Event()

    def __init__(self) -> None:
        self._closed = threading.Event()

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._closed.wait()
        Late.answered.set()
        return "too late", 1.0, True, False, {}

    def close(self) -> None:
        self._closed.set()
