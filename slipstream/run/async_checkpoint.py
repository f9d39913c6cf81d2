"""Checkpoints that are finished while the run goes on, one at a time.

    begin(save)    the one before is finished; then waits until `save` says that training may go on
    check()        raises what has gone wrong since
    finish()       waits for the last one

Knows nothing of what is saved: that no half of it is ever seen is `checkpoint.manager`'s matter.
Called by the phases of a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from slipstream.deadlines import Deadlines
from slipstream.errors import StageTimeoutError
from slipstream.threads import DaemonThreads, arrival

_THREADS = DaemonThreads("checkpoint")


class AsyncCheckpoints:
    """The save under way. An error of it ends the run at the next call, as one that is waited for
    does."""

    def __init__(self, deadlines: Deadlines, notify: Callable[[str], None]) -> None:
        self._deadlines = deadlines
        self._notify = notify
        self._under_way: Future[object] | None = None

    async def begin(self, save: Callable[[Callable[[], None]], object]) -> None:
        """Have `save(go_on)` done; returns when it has called `go_on`, or ended. Raises what this
        save has raised by then, or the one before."""
        async with self._stage():
            await self._finish()
            may_go_on: Future[None] = Future()

            def go_on() -> None:
                if not may_go_on.done():
                    may_go_on.set_result(None)

            self._under_way = _THREADS.submit(lambda: save(go_on))
            self._under_way.add_done_callback(lambda _: go_on())
            await arrival(may_go_on)
            self.check()

    def check(self) -> None:
        """Raise what the last save has raised, if it is over. Does not wait."""
        if self._under_way is not None and self._under_way.done():
            done, self._under_way = self._under_way, None
            done.result()

    async def finish(self) -> None:
        """Wait for the last save, and raise what it has raised. Raises StageTimeoutError past the
        deadline."""
        async with self._stage():
            await self._finish()

    async def give_up(self) -> None:
        """`finish`, where another error ends the run: one of the save is only said."""
        try:
            await self.finish()
        except Exception as error:
            self._notify(f"and the last checkpoint was not written: {error}")

    @contextlib.asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        try:
            async with self._deadlines.stage("checkpoint", "writing it to disk"):
                yield
        except StageTimeoutError:
            self._under_way = None  # Nobody waits for it again.
            raise

    async def _finish(self) -> None:
        if self._under_way is not None:
            await arrival(self._under_way)
        self.check()
