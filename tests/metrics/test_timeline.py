"""The timeline of a run is written as events and read back as nested spans."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from slipstream.metrics.timeline import (
    Timeline,
    extend_to,
    mark_command_start,
    read_timeline,
    take_command_start,
)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timeline_at(path: Path) -> tuple[Timeline, Clock]:
    clock = Clock()
    return Timeline(path, clock=clock, now=clock), clock


def test_spans_nest_and_processes_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    timeline, clock = timeline_at(path)
    timeline.start(95.0, mode="rl")
    with timeline.span("rl"):
        clock.now = 103.0
        with timeline.span("testing", step=2):
            clock.now = 104.5
        clock.now = 110.0
    timeline.stop("interrupted")
    timeline.start(mode="rl")
    clock.now = 120.0
    timeline.stop("finished")
    (first, second), problems = read_timeline(path)
    assert problems == []
    assert (first.begin, first.seconds, first.status) == (95.0, 15.0, "interrupted")
    assert first.facts == {"mode": "rl"}
    (rl,) = first.spans
    assert (rl.name, rl.begin, rl.end, rl.seconds, rl.own) == ("rl", 100.0, 110.0, 10.0, 8.5)
    (testing,) = rl.inner
    assert (testing.name, testing.seconds, testing.facts) == ("testing", 1.5, {"step": 2})
    assert (second.begin, second.seconds, second.status, second.spans) == (
        110.0, 10.0, "finished", [],
    )  # fmt: skip


def test_a_span_ends_if_its_body_raises(tmp_path: Path) -> None:
    timeline, clock = timeline_at(tmp_path / "events.jsonl")
    timeline.start()

    def fail() -> None:
        with timeline.span("rl"):
            clock.now = 104.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    ((process,), _) = read_timeline(tmp_path / "events.jsonl")
    assert (process.spans[0].seconds, process.status) == (4.0, None)


def test_open_spans_of_a_killed_process_last_until_its_last_activity(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        {"time": 10.0, "event": "start"},
        {"time": 11.0, "event": "begin", "span": "rl"},
        {"time": 15.0, "event": "begin", "span": "testing"},
        {"time": 18.0, "event": "end", "span": "testing", "seconds": 3.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 19.0, "ev')
    ((process,), problems) = read_timeline(path)
    assert problems == ["events.jsonl, line 5 is not an event"]
    (rl,) = process.spans
    assert (rl.end, rl.seconds, process.last) == (None, 7.0, 18.0)
    extend_to(process, 30.0)
    assert (rl.seconds, process.seconds, process.status) == (19.0, 20.0, None)
    # The start of a second process does not change the spans of the first one.
    lines.append({"time": 40.0, "event": "start"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (process, second), problems = read_timeline(path)
    assert (process.spans[0].seconds, second.spans, problems) == (7.0, [], [])


def test_an_unfinished_inner_span_ends_with_its_outer_span(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        {"time": 0.0, "event": "start"},
        {"time": 1.0, "event": "begin", "span": "rl"},
        {"time": 2.0, "event": "begin", "span": "testing"},
        {"time": 5.0, "event": "end", "span": "rl", "seconds": 4.0},
        {"time": 6.0, "event": "begin", "span": "evaluate"},
        {"time": 7.0, "event": "end", "span": "evaluate", "seconds": 1.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((process,), _) = read_timeline(path)
    assert [(span.name, span.seconds) for span in process.spans] == [("rl", 4.0), ("evaluate", 1.0)]
    assert process.spans[0].inner[0].seconds == 3.0


@pytest.mark.parametrize("line", ["x", "[]", "3", '{"time": 1}', '{"time": "a", "event": "stop"}'])
def test_a_damaged_line_is_skipped_and_reported(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    end = '{"time": 9, "event": "stop", "status": "finished"}'
    path.write_text(f'{{"time": 1, "event": "start"}}\n{line}\n{end}\n')
    ((process,), problems) = read_timeline(path)
    assert (process.seconds, process.status) == (8.0, "finished")
    assert problems == ["events.jsonl, line 2 is not an event"]


def test_a_missing_file_has_no_processes(tmp_path: Path) -> None:
    assert read_timeline(tmp_path / "events.jsonl") == ([], [])


def test_a_write_error_is_logged_once_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    timeline, _ = timeline_at(tmp_path / "file" / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        timeline.start()
        with timeline.span("rl"):
            pass
        timeline.stop("finished")
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()


def test_the_command_start_is_returned_once() -> None:
    take_command_start()
    assert take_command_start() is None
    mark_command_start()
    began = take_command_start()
    assert began is not None
    assert take_command_start() is None


def test_events_after_an_incomplete_line_start_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "event": "start"}\n{"time": 2.0, "ev')
    timeline, _ = timeline_at(path)
    timeline.start()
    timeline.stop("finished")
    processes, problems = read_timeline(path)
    assert [process.begin for process in processes] == [1.0, 100.0]
    assert problems == ["events.jsonl, line 2 is not an event"]
    assert path.read_text().count("\n") == 4
