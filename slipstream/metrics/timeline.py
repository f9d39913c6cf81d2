"""When a run did what: one JSON line in `events.jsonl` where something begins, ends or is written.

    {"time": ..., "event": "start", "argv": [...], "environment": {...}}
    {"time": ..., "event": "begin", "span": "rl"}
    {"time": ..., "event": "end", "span": "rl", "seconds": 81.2}
    {"time": ..., "event": "stop", "status": "finished"}

Times are seconds since 1970. A process that was killed has no `stop`, and its open spans no `end`.
Spans nest. Knows nothing of what a run computes. Written by the loops, read by the report.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
_log = logging.getLogger(__name__)


_command_began: float | None = None


def command_begins() -> None:
    """Called by a command line before it imports what takes its time: that is the run's, too."""
    global _command_began
    _command_began = time.time()


def command_began() -> float | None:
    """When the command began that the process makes its first run for; None for later ones."""
    global _command_began
    began, _command_began = _command_began, None
    return began


class Timeline:
    """Appends to `path`. A file that cannot be written never ends a run: it is said once."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._clock, self._now = clock, now
        self._broken = self._begun = False

    def start(self, began: float | None = None, **facts: Any) -> None:
        """A process begins, or did at `began` (seconds since 1970), with `facts` about it."""
        self._write({"event": "start", **facts}, began)

    def stop(self, status: str) -> None:
        """The process ends by itself: `finished`, `interrupted`, or why not."""
        self._write({"event": "stop", "status": status})

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """The body is `name`, also where it raises."""
        self._write({"event": "begin", "span": name, **facts})
        began = self._clock()
        try:
            yield
        finally:
            seconds = round(self._clock() - began, 6)
            self._write({"event": "end", "span": name, "seconds": seconds, **facts})

    def _write(self, event: dict[str, Any], at: float | None = None) -> None:
        if self._broken:
            return
        line = {"time": round(self._now() if at is None else at, 3), **event}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = not self._begun and _is_torn(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps(line, default=str) + "\n")
            self._begun = True
        except OSError as error:
            self._broken = True
            _log.warning("%s cannot be written, and the report will lack it: %s", self.path, error)


@dataclass(slots=True)
class Span:
    """Something that took `seconds`; `end` is None where it was still going on, or was killed.

    `inner` lie in it, in order.
    """

    name: str
    begin: float
    end: float | None = None
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    inner: list[Span] = field(default_factory=list)

    @property
    def own(self) -> float:
        """Seconds in none of its inner spans."""
        return self.seconds - sum(span.seconds for span in self.inner)


@dataclass(slots=True)
class Process:
    """One process of a run. `last` is when it is known to have been there; `status` is None where
    it has not said how it ended."""

    begin: float
    last: float
    facts: dict[str, Any] = field(default_factory=dict)
    status: str | None = None
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.last - self.begin


def read_timeline(path: Path) -> tuple[list[Process], list[str]]:
    """The processes of an `events.jsonl`, in order, and what was wrong with the file.

    Lines that are none (a torn last one, say) are passed over. Spans without an end last until the
    process was last heard of.
    """
    processes: list[Process] = []
    problems: list[str] = []
    stack: list[Span] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = json.loads(line)
            when, kind = float(event.pop("time")), str(event.pop("event"))
            if kind == "start":
                _close(processes, stack)
                processes.append(Process(begin=when, last=when, facts=event))
            elif processes:
                _take(processes[-1], stack, kind, when, event)
            else:
                problems.append(f"{path.name}, line {number}: before any process began")
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(f"{path.name}, line {number} is no event")
    _close(processes, stack)
    return processes, problems


def heard_of(process: Process, when: float) -> None:
    """It was there at `when`, too, by another record: open spans last until then."""
    process.last = max(process.last, when)
    open_spans = process.spans
    while open_spans and open_spans[-1].end is None:
        open_spans[-1].seconds = process.last - open_spans[-1].begin
        open_spans = open_spans[-1].inner


def _take(
    process: Process, stack: list[Span], kind: str, when: float, event: dict[str, Any]
) -> None:
    process.last = max(process.last, when)
    if kind == "begin":
        name = str(event.pop("span"))
        span = Span(name=name, begin=when, facts=event)
        (stack[-1].inner if stack else process.spans).append(span)
        stack.append(span)
    elif kind == "end":
        # What is open inside of it was never ended: its process died in between, or a thread did.
        while stack and stack[-1].name != event["span"]:
            lost = stack.pop()
            lost.seconds = when - lost.begin
        if stack:
            span = stack.pop()
            span.end, span.seconds = when, float(event["seconds"])
    elif kind == "stop":
        process.status = str(event["status"])


def _close(processes: list[Process], stack: list[Span]) -> None:
    while stack:
        span = stack.pop()
        span.seconds = processes[-1].last - span.begin


def _is_torn(path: Path) -> bool:
    """Whether a process that ended in the middle left a line without its end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
