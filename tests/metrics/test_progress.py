"""Progress is shown as a bar on a terminal of any width, and as plain lines elsewhere."""

from __future__ import annotations

import errno
import io
import re

import pytest
from rich.console import Console

from slipstream.metrics.progress import Progress, SteadyConsole, is_interactive


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock, every: float = 10.0) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = SteadyConsole(file=stream, width=40)
    return Progress(console=console, every_seconds=every, clock=clock), stream


@pytest.mark.parametrize(
    ("terminal", "environ", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "CI": "true"}, False),
        (True, {"TERM": "xterm", "CI": "0"}, True),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_is_interactive(terminal: bool, environ: dict[str, str], expected: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert is_interactive(console, environ) is expected


def test_plain_lines_at_first_and_last_step_and_at_intervals() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    with progress:
        progress.phase("RL", 6)
        for reward in (0.25, 0.3, 0.35, 0.4, 0.45, 0.5):
            clock.now += 6.0
            progress.step(reward=reward, mean_length=120.4, tokens_per_second=3456.7)
        progress.note("saved [global_step_6] with a line that is longer than the console")
    assert stream.getvalue().splitlines() == [
        "RL: 6 steps",
        "RL 1/6  reward 0.25  length 120  tok/s 3457",
        "RL 3/6  reward 0.35  length 120  tok/s 3457  18s left",
        "RL 5/6  reward 0.45  length 120  tok/s 3457  6s left",
        "RL 6/6  reward 0.5  length 120  tok/s 3457",
        "saved [global_step_6] with a line that is longer than the console",
    ]


def test_remaining_time_uses_recent_steps_of_a_resumed_phase() -> None:
    clock = Clock()
    progress, stream = plain(clock)
    with progress:
        progress.phase("RL", 130, done=100)
        assert progress.remaining() is None
        clock.now += 1000.0
        progress.step()
        # The first step includes compilation, so there is no estimate.
        assert progress.remaining() is None
        for _ in range(20):
            clock.now += 300.0
            progress.step()
        assert progress.remaining() == 9 * 300.0
    assert stream.getvalue().startswith(
        "RL: 130 steps, 100 done\nRL 101/130\nRL 102/130  2h20m left"
    )
    assert stream.getvalue().endswith("RL 121/130  45m00s left\n")


def test_remaining_time_adapts_when_steps_become_slower() -> None:
    clock = Clock()
    progress, _ = plain(clock)
    with progress:
        progress.phase("RL", 200)
        for seconds in (*[1.0] * 60, *[3.0] * 40):
            clock.now += seconds
            progress.step()
        # The estimate may include extra time, since a third of the steps were slower than usual.
        assert 3.0 * 100 <= progress.remaining() <= 4.0 * 100  # type: ignore[operator]


def test_remaining_time_includes_occasional_validation() -> None:
    clock = Clock()
    progress, _ = plain(clock)
    with progress:
        progress.phase("SFT", 500)
        for step in range(1, 251):
            clock.now += 0.1 + (15.0 if step % 50 == 0 else 0.0)
            progress.step()
            if step >= 150:
                # 0.4 seconds per step, including validation.
                assert progress.remaining() == pytest.approx(0.4 * (500 - step), rel=0.25)


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 40, 200])
def test_the_bar_works_at_any_terminal_width(width: int) -> None:
    stream = io.StringIO()
    console = SteadyConsole(file=stream, force_terminal=True, width=width, height=5)
    with Progress(console=console, plain=False) as progress:
        progress.phase("supervised fine-tuning", 2)
        progress.step(loss=1.25)
        progress.phase("[RL]", 3)
        progress.step(reward=float("nan"), mean_length=1e9, tokens_per_second=0.0)
        progress.note("a note")
    if width == 200:
        assert "loss 1.25" in stream.getvalue()
        assert "1/3" in stream.getvalue()
        assert "a note" in stream.getvalue()


class ClosedStream(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "session is gone")])
@pytest.mark.parametrize("as_lines", [True, False])
def test_a_closed_terminal_does_not_stop_a_run(as_lines: bool, error: OSError) -> None:
    console = SteadyConsole(file=ClosedStream(error), force_terminal=not as_lines)
    with Progress(console=console, plain=as_lines) as progress:
        progress.phase("RL", 2)
        progress.step(reward=1.0)
        progress.note("not shown")


def test_nothing_is_printed_outside_of_the_context() -> None:
    progress, stream = plain(Clock())
    progress.phase("RL", 1)
    progress.step(reward=1.0)
    progress.note("not shown")
    assert stream.getvalue() == ""


def test_status_and_sample_with_marked_drafts_are_shown_below_the_bar() -> None:
    stream = io.StringIO()
    console = SteadyConsole(file=stream, force_terminal=True, width=60, height=20)
    with Progress(console=console, plain=False) as progress:
        progress.phase("RL", 3)
        progress.status(lambda: "engine: 3 running, drafts 4_1_5")
        progress.sample("reward 1:", ["2", " +\n", " 3"], "010")
        progress.step(reward=1.0)
    shown = stream.getvalue()
    assert "engine: 3 running, drafts 4_1_5" in shown
    # Codes 4 and 32 are underlined and green; the text before and after has neither.
    assert "\x1b[2mreward 1: \x1b[0m2\x1b[4;32m + \x1b[0m 3" in shown


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_long_sample_is_cut_at_its_start(width: int) -> None:
    stream = io.StringIO()
    console = SteadyConsole(file=stream, force_terminal=True, width=width, height=20)
    with Progress(console=console, plain=False) as progress:
        progress.phase("RL", 3)
        progress.sample("reward 1:", [f" {i}" for i in range(999)], "0" * 999)
        assert progress._sample is not None
        assert progress._sample.plain.startswith("reward 1: ...")
        assert progress._sample.plain.endswith(" 997 998")
        assert len(progress._sample) <= max(34, 3 * width)


@pytest.mark.parametrize("errors", ["strict", "backslashreplace"])
@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_ascii_terminal(width: int, errors: str) -> None:
    """Rich shortens lines with an ellipsis, which ASCII lacks."""
    raw = io.BytesIO()
    # With backslashreplace an escaped character would need more room than the bar has.
    stream = io.TextIOWrapper(raw, encoding="ascii", errors=errors, write_through=True)
    console = SteadyConsole(file=stream, force_terminal=True, width=width, height=20)
    with Progress(console=console, plain=False) as progress:
        for phase in ("SFT", "RL"):
            progress.phase(phase, 3)
            progress.status(lambda: "16 running, 240 waiting, plan 12_4_48, 123,456 tokens")
            for _ in range(3):
                progress.step(reward=1.0, loss=1.25, mean_length=120.4, tokens_per_second=3456.7)
    shown = raw.getvalue().decode("ascii")
    assert "3/3" in shown
    # A `?` after text, not one of an escape sequence: it replaces the ellipsis.
    assert re.search(r"[\w ]\?", shown)
    assert "\\u" not in shown


def test_a_terminal_without_colors_and_unicode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = SteadyConsole(file=stream, force_terminal=True, width=60, height=20)
    with Progress(console=console, plain=False) as progress:
        progress.phase("RL", 3)
        progress.note("caf\N{LATIN SMALL LETTER E WITH ACUTE}")
        progress.sample("reward 1:", ["\N{GREEK SMALL LETTER PI}", "2"], "01")
        progress.step(reward=1.0)
    shown = raw.getvalue().decode("ascii")
    assert "caf?" in shown
    # Drafted tokens are still underlined.
    assert "?\x1b[4m2\x1b[0m" in shown
    assert "32m" not in shown


def test_plain_output_has_no_status_and_no_sample() -> None:
    progress, stream = plain(Clock())
    with progress:
        progress.phase("RL", 1)
        progress.status(lambda: "engine")
        progress.sample("reward", ["a"], "0")
        progress.step(reward=1.0)
    assert stream.getvalue() == "RL: 1 steps\nRL 1/1  reward 1\n"


def test_status_errors_are_ignored_and_control_characters_replaced() -> None:
    stream = io.StringIO()
    console = SteadyConsole(file=stream, force_terminal=True, width=60, height=20)

    def fail() -> str:
        raise RuntimeError("the engine is gone")

    with Progress(console=console, plain=False) as progress:
        progress.phase("RL", 3)
        progress.status(fail)
        # Control sequences that would set the window title and ring the bell.
        progress.sample("reward 1:", ["\x1b]0;title\x07", "2"], "00")
        progress.note("a \x1b[31mnote\x9b")
        progress.step(reward=1.0)
    shown = stream.getvalue()
    assert "?]0;title?2" in shown
    assert "a ?[31mnote?" in shown
    assert "1/3" in shown
