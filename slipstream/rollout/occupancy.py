"""How full the engines were while a batch was made: its tail, and the wait for rewards after it.

Knows when responses begin and end, nothing else. Called by the rollout manager.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Occupancy:
    """Seconds by how many responses are under way, in an engine or in its queue.

    `tail_seconds`: at least one, but fewer than half as many as there have been at once;
    `empty_seconds`: none any more, though the batch was not done.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tail_seconds = self.empty_seconds = 0.0
        self._clock = clock
        self._running = self._most = 0
        self._since = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A response is under way in the body."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def finish(self) -> None:
        """The batch is done."""
        self._change(0)

    def _change(self, by: int) -> None:
        now = self._clock()
        if self._most and not self._running:
            self.empty_seconds += now - self._since
        elif 2 * self._running < self._most:
            self.tail_seconds += now - self._since
        self._since = now
        self._running += by
        self._most = max(self._most, self._running)
