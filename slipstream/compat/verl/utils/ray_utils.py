"""verl's module `verl.utils.ray_utils`: the event loop of the caller."""

from __future__ import annotations

import asyncio

__all__ = ["get_event_loop"]


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, or a new one, set as the thread's, if none is running."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
