"""Finishes checkpoints in the background while training continues, one checkpoint at a time.

    begin(save)    waits for the previous save, starts `save`, returns when training may continue
    check()        raises the error of the last save, if it failed
    finish()       waits for the last save

It does not know what is saved. `checkpoint.manager` makes sure that a half-written checkpoint is
never read. Called by the phases of a run.
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
    """The current save. If it fails, the next call raises its error, which ends the run."""

    def __init__(self, deadlines: Deadlines, notify: Callable[[str], None]) -> None:
        self._deadlines = deadlines
        self._notify = notify
        self._under_way: Future[object] | None = None

    async def begin(self, save: Callable[[Callable[[], None]], object]) -> None:
        """Start `save(go_on)`. Returns when it has called `go_on` or has ended.

        Raises the error of the previous save, or of this one if it has failed by then.
        """
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
        """Raise the error of the last save, if it has ended with one. Does not wait."""
        if self._under_way is not None and self._under_way.done():
            done, self._under_way = self._under_way, None
            done.result()

    async def finish(self) -> None:
        """Wait for the last save and raise its error, if any. Raises StageTimeoutError after the
        deadline."""
        async with self._stage():
            await self._finish()

    async def give_up(self) -> None:
        """Like `finish`, when another error ends the run: an error of the save is only printed."""
        try:
            await self.finish()
        except Exception as error:
            self._notify(f"the last checkpoint was not written either: {error}")

    @contextlib.asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        try:
            async with self._deadlines.stage("checkpoint", "writing it to disk"):
                yield
        except StageTimeoutError:
            self._under_way = None  # Do not wait for it again.
            raise

    async def _finish(self) -> None:
        if self._under_way is not None:
            await arrival(self._under_way)
        self.check()
