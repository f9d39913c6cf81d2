"""Measures how well engines were used during a batch: its tail, and the waits for tools and
rewards.

This module knows only when responses and episodes start and end. The rollout manager calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Occupancy:
    """Counts seconds by the number of responses in an engine or its queue.

    `tail_seconds`: at least one response is running, but fewer than half of the batch's maximum.
    `tool_seconds`: no response is running, but at least one episode is: its environment works.
    `empty_seconds`: no episode is running any more, but the batch is not done.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tail_seconds = self.tool_seconds = self.empty_seconds = 0.0
        self._clock = clock
        self._running = self._most = self._episodes = 0
        self._since = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A context manager: one response is running in its body."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def episode(self) -> Iterator[None]:
        """A context manager: one episode is running in its body."""
        self._change(0, episodes=+1)
        try:
            yield
        finally:
            self._change(0, episodes=-1)

    def finish(self) -> None:
        """Count the time until now: the batch is done."""
        self._change(0)

    def _change(self, by: int, *, episodes: int = 0) -> None:
        now = self._clock()
        if self._most and not self._running and self._episodes:
            self.tool_seconds += now - self._since
        elif self._most and not self._running:
            self.empty_seconds += now - self._since
        elif 2 * self._running < self._most:
            self.tail_seconds += now - self._since
        self._since = now
        self._running += by
        self._episodes += episodes
        self._most = max(self._most, self._running)
