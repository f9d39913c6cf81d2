"""The timeline of a run: one JSON line in `events.jsonl` per event.

    {"time": ..., "event": "start", "argv": [...], "environment": {...}}
    {"time": ..., "event": "begin", "span": "rl"}
    {"time": ..., "event": "end", "span": "rl", "seconds": 81.2}
    {"time": ..., "event": "stop", "status": "finished"}

Times are seconds since 1970. A killed process has no `stop`, and its open spans have no `end`.
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


_command_start: float | None = None


def mark_command_start() -> None:
    """Record the start time of a command. Call it before slow imports, which are then counted."""
    global _command_start
    _command_start = time.time()


def take_command_start() -> float | None:
    """Return the recorded start time once, to the first run of the process; then None."""
    global _command_start
    began, _command_start = _command_start, None
    return began


class Timeline:
    """Appends events to `path`. If the file cannot be written, it warns once and stops writing."""

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
        """Record the start of a process, now or at `began` (seconds since 1970), with `facts`."""
        self._write({"event": "start", **facts}, began)

    def stop(self, status: str) -> None:
        """Record the regular end of the process: `finished`, `interrupted`, or the error."""
        self._write({"event": "stop", "status": status})

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """Record the body as the span `name`, also if it raises."""
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
    """A named interval of `seconds`, with nested spans `inner` in order.

    `end` is None if the span did not end, because it is in progress or its process was killed.
    """

    name: str
    begin: float
    end: float | None = None
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    inner: list[Span] = field(default_factory=list)

    @property
    def own(self) -> float:
        """Seconds outside of the inner spans."""
        return self.seconds - sum(span.seconds for span in self.inner)


@dataclass(slots=True)
class Process:
    """One process of a run. `last` is the time of its last known activity.

    `status` is None if the process did not record how it ended.
    """

    begin: float
    last: float
    facts: dict[str, Any] = field(default_factory=dict)
    status: str | None = None
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.last - self.begin


def read_timeline(path: Path) -> tuple[list[Process], list[str]]:
    """Return the processes of an `events.jsonl` in order, and the problems found in the file.

    Invalid lines, such as an incomplete last line, are skipped. A span without an end lasts until
    the last known activity of its process.
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
        except Exception:  # a line may hold anything
            problems.append(f"{path.name}, line {number} is not an event")
    _close(processes, stack)
    return processes, problems


def extend_to(process: Process, when: float) -> None:
    """Extend a process and its open spans to `when`, a time of activity from another source."""
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
        # Inner spans without an end: their process or thread died before it could record one.
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
    """Return whether the last line is incomplete, because its process died while writing it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
