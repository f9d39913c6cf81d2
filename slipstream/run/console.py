"""Prints a run's metrics on the console: values at the progress bar, and a line for some steps.

It replaces the plain `console` logger if a progress display is shown, so that their outputs do not
mix. Called by the phases of a run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

from slipstream.metrics.names import METRICS, find
from slipstream.metrics.progress import Progress
from slipstream.run.conversation import parts_of
from slipstream.types import Group, Prompt, Sample

LINES_PER_PHASE = 25
"""The approximate number of steps of a phase that print a line."""

LONGEST_SILENCE = 10.0
"""If no line was printed for this many seconds, the next step prints one."""

_ORDER = {id(metric): place for place, metric in enumerate(METRICS)}
_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")
_FIRST = ("reward", "loss", "length")
_NOT_SHOWN = ("s/step",)
"""Not shown, because the remaining time is."""

_TEXT_WIDTH = 72


class StepLines:
    """A `MetricsLogger` for a progress display: every step moves the bar, some steps print a line.

    It prints the first and the last step, about `LINES_PER_PHASE` steps in between, and a step
    after a long silence. With `lines=False` it only moves the bar.
    """

    def __init__(
        self,
        progress: Progress,
        name: str,
        total: int,
        *,
        lines: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._name = name
        self._total = total
        self._lines = lines
        self._clock = clock
        self._every = math.ceil(total / LINES_PER_PHASE)
        self._last = float("-inf")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            return  # the validation before the first step, which prints its own result
        values = headlines(metrics)
        self._progress.step(**values)
        if not self._lines or not self._due(step):
            return
        self._last = self._clock()
        place = f"{self._name} {step}/{self._total}"
        shown = "  ".join(f"{label} {short(value):<6}" for label, value in values.items())
        left = self._progress.remaining()
        eta = f"  {duration(left)} left" if left is not None and step < self._total else ""
        self._progress.note(f"{place:<{len(self._name) + 8}} {shown}{eta}".rstrip())

    def close(self) -> None:
        """Do nothing."""

    def _due(self, step: int) -> bool:
        return (
            step % self._every == 0
            or step in (1, self._total)
            or self._clock() - self._last >= LONGEST_SILENCE
        )


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with a short label in the table of metrics, the most important first."""
    found = [(metric, value) for name, value in metrics.items() if (metric := find(name))]
    labelled = [
        (metric, value)
        for metric, value in found
        if metric.headline
        and metric.headline not in _NOT_SHOWN
        and not metric.name.startswith("val-core/")
    ]
    labelled.sort(key=lambda pair: (pair[0].headline not in _FIRST, _ORDER[id(pair[0])]))
    return {metric.headline: value for metric, value in labelled}


def accuracies(metrics: Mapping[str, float]) -> list[str]:
    """One text per data source of a validation: accuracy, its interval and the number of problems.

    A value outside [0, 1] is a reward; it has no interval.
    """
    texts = []
    for name, value in metrics.items():
        match = _ACCURACY.fullmatch(name)
        if match is None:
            continue
        source, aux = match["source"], f"val-aux/{match['source']}"
        low = metrics.get(f"{aux}/acc/mean@{match['n']}/ci_low")
        high = metrics.get(f"{aux}/acc/mean@{match['n']}/ci_high")
        interval = "" if low is None or high is None else f" (95 %: {low:.3f} to {high:.3f})"
        count = metrics.get(f"{aux}/num_prompts")
        on = "" if count is None else f" on {count:.0f} held-out problems"
        what = "accuracy" if interval else "mean reward"
        texts.append(f"{what} {value:.3f}{interval}{on}, {source}")
    return texts


def shown_samples(groups: Sequence[Group], count: int) -> list[tuple[Prompt, Sample]]:
    """The first response to at most `count` prompts, spread evenly over `groups`."""
    chosen = min(count, len(groups))
    spread = [groups[number * len(groups) // chosen] for number in range(chosen)]
    return [(group.prompt, group.samples[0]) for group in spread]


def sample_texts(
    shown: Sequence[tuple[Prompt, Sample]], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """One line of text per prompt and response. Episodes of several turns have a line per turn and
    answer; `decode` makes their text."""
    texts = []
    for prompt, sample in shown:
        messages = prompt.messages
        asked = messages if isinstance(messages, str) else str(messages[-1].get("content", ""))
        start = f"  {short(sample.reward):>5} | {_one_line(asked)}"
        if sample.episode is not None and sample.episode.turns > 1:
            texts += [start, *(f"        | {line}" for line in conversation(sample, decode))]
        else:
            texts.append(f"{start} => {_one_line(sample.response)}")
    return texts


def conversation(sample: Sample, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """One line for each turn of an episode and each answer, with the rewards of the turn. `decode`
    makes the text."""
    lines = []
    for part in parts_of(sample):
        role = "policy" if part.segment.role == "assistant" else part.segment.role
        ends = "".join(f"  [{one.name} {one.value:+.3g}]" for one in part.rewards)
        lines.append(f"{role:<6}  {_one_line(decode(part.segment.ids))}{ends}")
    return lines


def short(value: float) -> str:
    """Format a number with three significant digits; large numbers as integers."""
    if not math.isfinite(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds: `75` becomes `1m15s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _one_line(text: str) -> str:
    """Put a text on one line. Of a long text, keep the beginning and the end, where answers are."""
    text = " ".join(text.split())
    half = _TEXT_WIDTH // 2
    return (
        text if len(text) <= _TEXT_WIDTH else f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"
    )
