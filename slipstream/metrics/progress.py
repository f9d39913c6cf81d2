"""Progress display: on a terminal a bar with engine status and a recent sample, else plain lines.

Knows nothing of training. Called by the loops. Never ends a run: after the terminal is closed, it
prints nothing.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

_WINDOW = 20
"""Number of last steps whose median duration estimates the remaining time."""

_ALL = 500
"""Number of last steps over which occasional work, such as validation, is averaged."""

_LABELS = {
    "reward": "reward",
    "mean_length": "length",
    "tokens_per_second": "tok/s",
    "loss": "loss",
    "accuracy": "accuracy",
}


def is_interactive(console: Console, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether to draw a redrawing bar: on a real terminal, but not in a CI log."""
    return (
        console.is_terminal
        and environ.get("TERM", "").lower() not in ("dumb", "unknown")
        and environ.get("CI", "").lower() in ("", "0", "false")
    )


DRAFTED = "underline green"
"""Style of drafted tokens; on terminals without colors they are still underlined."""

_SAMPLE_LINES = 3
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class SteadyConsole(Console):
    """A rich console that survives broken pipes and characters outside the encoding.

    When its reader is gone it prints nothing; rich's own console ends the process. A character
    that the encoding lacks is printed as `?`; rich's own console raises an error.
    """

    def __init__(self, *, file: IO[str], **more: Any) -> None:
        if isinstance(file, io.TextIOWrapper) and file.errors != "replace":
            # Also needed for rich itself, which shortens lines with a non-ASCII ellipsis.
            file.reconfigure(errors="replace")
        super().__init__(file=file, **more)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Shows the phase, the step, values of the last step, and the remaining time.

    `plain` None means: plain lines unless `is_interactive`. A plain line is printed at the first
    and the last step of a phase, and otherwise every `every_seconds`. Use it as a context manager;
    outside of the context nothing is shown.
    """

    def __init__(
        self,
        *,
        console: SteadyConsole | None = None,
        plain: bool | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or SteadyConsole(file=sys.stderr)
        self._plain = not is_interactive(self._console) if plain is None else plain
        self._every = every_seconds
        self._clock = clock
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._total = 0
        self._done = 0
        self._first = True
        self._lines = True
        self._last_line = float("-inf")
        self._times: deque[float] = deque(maxlen=_ALL + 1)
        self._entered = False
        self._status: Callable[[], str] | None = None
        self._sample: Text | None = None

    def __enter__(self) -> Self:
        self._entered = True
        if not self._plain:
            self._bar = _Bar(
                self._below,
                TextColumn("[bold]{task.description}", markup=True),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                _Values(),
                console=self._console,
                refresh_per_second=2,
            )
            self._guard(self._bar.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._guard(self._bar.stop)
        self._entered = False

    def phase(self, name: str, total: int, *, done: int = 0, lines: bool = True) -> None:
        """Start a phase of `total` steps, `done` of which were finished before a resume.

        With `lines=False` no step lines are printed, because a console logger prints them.
        """
        self._name, self._total, self._done = name, total, done
        self._lines = lines
        self._times.clear()
        self._first = True
        self._last_line = float("-inf")
        if self._bar is not None:
            self._guard(partial(self._begin_bar, self._bar, done))
        elif self._entered:
            self._line(f"{name}: {total} steps" + (f", {done} done" if done else ""))

    def _begin_bar(self, bar: RichProgress, done: int) -> None:
        if self._task is not None:
            bar.stop_task(self._task)
        self._task = bar.add_task(self._name, total=self._total, completed=done, values="")

    def step(self, **values: float) -> None:
        """Count one finished step and show its `values` (reward, mean_length, ...)."""
        self._done += 1
        now = self._clock()
        self._times.append(now)
        parts = [f"{_LABELS.get(key, key)} {_short(value)}" for key, value in values.items()]
        if (left := self.remaining()) is not None and self._done < self._total:
            parts.append(f"{_duration(left)} left")
        text = "  ".join(parts)
        if self._bar is not None and self._task is not None:
            bar, task = self._bar, self._task
            self._guard(lambda: bar.update(task, completed=self._done, values=text))
        elif self._bar is None and self._entered and self._lines:
            edge = self._done >= self._total or self._first
            if edge or now - self._last_line >= self._every:
                self._last_line = now
                self._line(f"{self._name} {self._done}/{self._total}  {text}".rstrip())
        self._first = False

    def remaining(self) -> float | None:
        """Return the estimated seconds until the end of the phase.

        None after its first step, which includes loading and compilation. The estimate is the
        median duration of recent steps, plus the average extra time of unusually long steps.
        """
        if len(self._times) < 2:
            return None
        durations = [b - a for a, b in pairwise(self._times)]
        usual, now = median(durations), median(durations[-_WINDOW:])
        return (now + max(0.0, fmean(durations) - usual)) * max(0, self._total - self._done)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._entered:
            self._line(text)

    @property
    def shows_samples(self) -> bool:
        """Whether samples are shown, which needs a bar."""
        return self._bar is not None

    def status(self, ask: Callable[[], str] | None) -> None:
        """Show the result of `ask` below the bar. It is called twice a second in another thread."""
        self._status = ask

    def sample(self, label: str, pieces: Sequence[str], drafted: str) -> None:
        """Show a response below the bar of a terminal, as `pieces` of text.

        Pieces with a "1" in `drafted` are highlighted. Only the end of a long response is shown.
        """
        if not self.shows_samples:
            return
        text = Text()
        for piece, mark in zip(pieces, drafted, strict=True):
            text.append(self._shown(" ".join(piece.split("\n"))), DRAFTED if mark == "1" else "")
        room = max(20, _SAMPLE_LINES * self._console.width - len(label) - 8)
        if len(text) > room:
            text = Text("... ") + text[len(text) - room :]
        self._sample = Text.assemble((self._shown(f"{label} "), "dim"), text)

    def _below(self) -> list[Text]:
        lines = []
        ask = self._status  # Read once: another thread may reset it.
        try:
            status = "" if ask is None else ask()
        except Exception:
            # An error in the display must not end the run or the display.
            status = ""
        if status:
            lines.append(Text(self._shown(status), style="dim", overflow="ellipsis", no_wrap=True))
        if self._sample is not None:
            lines.append(self._sample)
        return lines

    def _shown(self, text: str) -> str:
        """Replace control characters, and characters outside the terminal's encoding, by `?`.

        A model may emit control characters, which could change the state of the terminal.
        """
        encoding = self._console.encoding
        return _CONTROLS.sub("?", text).encode(encoding, "replace").decode(encoding)

    def _line(self, text: str) -> None:
        self._guard(lambda: self._console.print(Text(self._shown(text)), soft_wrap=True))

    def _guard(self, act: Callable[[], object]) -> None:
        """Run `act`. If the terminal is gone (OSError), stop all output instead of failing."""
        if self._console.quiet:
            return
        try:
            act()
        except OSError:
            self._console.quiet = True


class _Bar(RichProgress):
    """A progress bar with text lines below it."""

    def __init__(self, below: Callable[[], list[Text]], *columns: ProgressColumn, **more: Any):
        self._lines_below = below
        super().__init__(*columns, **more)

    def get_renderable(self) -> RenderableType:
        return Group(super().get_renderable(), *self._lines_below())


class _Values(ProgressColumn):
    """The column with the values of the last step, cut at the edge of the terminal."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("values", "")), no_wrap=True, overflow="ellipsis")


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
