"""Metric files survive crashes and resumes; a failing logger does not stop a run."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics.loggers import (
    LOGGERS,
    ConsoleLogger,
    JSONLLogger,
    LoggerContext,
    MetricsLogger,
    TeeLogger,
    TensorBoardLogger,
    build_loggers,
    read_jsonl,
    register_logger,
)


def test_jsonl_logger_writes_one_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "run" / "m.jsonl"
    logger = JSONLLogger(path, clock=lambda: 7.25)
    logger.log(1, {"a": 0.1, "b": 2})
    assert path.read_text() == '{"step": 1, "time": 7.25, "data": {"a": 0.1, "b": 2}}\n'
    logger.log(2, {})
    logger.close()
    assert read_jsonl(path) == [(1, {"a": 0.1, "b": 2.0}), (2, {})]


def test_non_finite_values_are_written_as_json_strings_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with closing(JSONLLogger(path)) as logger:
        logger.log(1, {"a": math.inf, "b": -math.inf, "c": math.nan})

    def forbid(constant: str) -> float:
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=forbid)
    ((_, data),) = read_jsonl(path)
    assert (data["a"], data["b"], math.isnan(data["c"])) == (math.inf, -math.inf, True)


def test_resume_drops_later_steps_and_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    logger = JSONLLogger(path)
    for step in (0, 1, 2, 2, 3):
        logger.log(step, {"x": step})
    logger.close()
    with path.open("a") as file:
        file.write('{"step": 2, "da')
    logger = JSONLLogger(path)
    logger.truncate_after(2)
    logger.log(3, {"x": 30})
    logger.close()
    assert [(step, data["x"]) for step, data in read_jsonl(path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (2, 2.0), (3, 30.0),
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("torn", ["x", "y" * 5000])
def test_opening_removes_an_incomplete_last_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    whole = '{"step": 1, "data": {}}\n'
    for text in (whole + torn, torn):
        path.write_text(text)
        JSONLLogger(path).close()
        assert path.read_text() == text.removesuffix(torn)


def test_read_jsonl_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "data": {}}\n{"step"')
    assert read_jsonl(path) == [(1, {})]
    assert path.read_text().endswith('{"step"')


@pytest.mark.parametrize("line", ["nonsense", '{"step": 1}', '{"step": 1, "data": 3}', "[]"])
def test_a_damaged_line_raises_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "data": {}}\n' + line + "\n")
    with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2, .*remove the line"):
        read_jsonl(path)
    logger = JSONLLogger(path, clock=lambda: 7.25)
    with pytest.raises(CheckpointError, match="line 2"):
        logger.truncate_after(1)
    logger.log(5, {})
    logger.close()
    assert path.read_text().splitlines()[1:] == [line, '{"step": 5, "time": 7.25, "data": {}}']


def test_console_logger_prints_headline_metrics_or_all() -> None:
    metrics = {
        "critic/score/mean": 0.51234,
        "critic/score/max": 1.0,
        "rollout/tokens_per_second": 1234.0,
        "val-core/countdown/acc/mean@1": 0.25,
    }
    stream = io.StringIO()
    console = ConsoleLogger(stream)
    console.log(3, metrics)
    console.log(4, {"critic/score/max": 1.0})
    assert stream.getvalue() == ("step 3  reward 0.5123  tok/s 1234  countdown/acc/mean@1 0.25\n")
    stream = io.StringIO()
    ConsoleLogger(stream, everything=True).log(3, {"critic/score/max": 1.0, "own": math.nan})
    assert stream.getvalue() == "step 3  critic/score/max 1  own nan\n"


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise AssertionError("close was called on a removed logger")


def test_a_failing_logger_is_reported_once_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    tee = TeeLogger([broken, JSONLLogger(tmp_path / "m.jsonl")])
    with caplog.at_level(logging.WARNING):
        tee.log(1, {"a": 1.0})
        tee.log(2, {"a": 2.0})
        tee.close()
    assert broken.calls == 1
    assert [record.message for record in caplog.records] == [
        "Broken failed and receives no more metrics: OSError: disk full"
    ]
    assert tee.failures == {"Broken": "OSError: disk full"}
    assert [step for step, _ in read_jsonl(tmp_path / "m.jsonl")] == [1, 2]


def test_strict_mode_raises_for_unknown_names_before_writing(tmp_path: Path) -> None:
    tee = build_loggers(["file"], tmp_path, "p", "e", strict=True)
    with pytest.raises(ValueError, match="unknown metric names: my/own"):
        tee.log(1, {"my/own": 1.0})
    tee.log(1, {"actor/lr": 1.0})
    tee.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [(1, {"actor/lr": 1.0})]


def test_build_loggers_renames_the_file_of_an_earlier_run(tmp_path: Path) -> None:
    for number in range(3):
        with closing(build_loggers(["file", "file"], tmp_path, "p", "e")) as tee:
            tee.log(number, {})
    found = {p.name: [step for step, _ in read_jsonl(p)] for p in tmp_path.iterdir()}
    assert found == {"metrics.1.jsonl": [0], "metrics.2.jsonl": [1], "metrics.jsonl": [2]}


def test_build_loggers_truncates_the_file_of_a_resumed_run(tmp_path: Path) -> None:
    tee = build_loggers(["file"], tmp_path, "p", "e", file_name="sft.jsonl")
    for step in range(4):
        tee.log(step, {})
    tee.close()
    tee = build_loggers(["file"], tmp_path, "p", "e", file_name="sft.jsonl", resume_step=1)
    tee.log(2, {})
    tee.close()
    assert [step for step, _ in read_jsonl(tmp_path / "sft.jsonl")] == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["sft.jsonl"]


def test_register_logger_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'; did you mean tensorboard\?"):
        build_loggers(["console", "tensorbord"], tmp_path, "p", "e")
    seen: list[str] = []

    @register_logger("mine")
    def mine(context: LoggerContext) -> MetricsLogger:
        seen.append(f"{context.project_name}/{context.experiment_name}")
        return ConsoleLogger()

    try:
        build_loggers(["mine"], tmp_path, "p", "e")
        assert seen == ["p/e"]
        with pytest.raises(ConfigError, match="registered already"):
            register_logger("mine")(mine)
    finally:
        del LOGGERS["mine"]


def test_missing_tensorboard_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have imported it, so hide all loaded modules of it.
    for name in [*sys.modules, "tensorboard", "tensorboard.compat.proto.event_pb2"]:
        if name.partition(".")[0] == "tensorboard":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_scalars_are_purged_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an optional extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tee = build_loggers(["tensorboard"], tmp_path, "p", "e")
    for step in (1, 2, 3):
        tee.log(step, {"actor/lr": step / 2})
    tee.close()
    again = build_loggers(["tensorboard"], tmp_path, "p", "e", resume_step=2)
    again.log(3, {"actor/lr": 9.0})
    again.close()
    assert tee.failures == again.failures == {}
    accumulator = EventAccumulator(str(tmp_path / "tensorboard" / "metrics"))
    accumulator.Reload()
    scalars = [(event.step, event.value) for event in accumulator.Scalars("actor/lr")]
    assert scalars == [(1, 0.5), (2, 1.0), (3, 9.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_tables_are_text_summaries(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an optional extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    logger = TensorBoardLogger(tmp_path)
    logger.log_table(1, "val/generations", [{"prompt": "2 + 2 = ?", "score": 1.0}])
    logger.log_table(2, "val/generations", [{"prompt": "é\n| x", "score": 0.5}] * 2)
    logger.log_table(3, "val/generations", [])
    logger.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert accumulator.PluginAssets("text") == []
    assert accumulator.SummaryMetadata("val/generations").plugin_data.plugin_name == "text"
    tables = {
        event.step: [[cell.decode() for cell in row] for row in make_ndarray(event.tensor_proto)]
        for event in accumulator.Tensors("val/generations")
    }
    assert tables == {
        1: [["prompt", "score"], ["2 + 2 = ?", "1.0"]],
        2: [["prompt", "score"], ["é\n| x", "0.5"], ["é\n| x", "0.5"]],
    }


def test_an_incomplete_line_is_removed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {}}\n{"step": 2, "da')
    assert read_jsonl(path) == [(1, {})]
    assert "line 2, is incomplete and is not read" in caplog.text
    JSONLLogger(path).close()
    assert f"{path}: removed an incomplete last line of 15 bytes" in caplog.text
    caplog.clear()
    JSONLLogger(path).close()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": ' + b"9" * 6000 + b', "data": {}}',
        b'{"step": 1, "data": ' + b"[" * 5000 + b"}",
        b'{"step": 1e999, "data": {}}',
        b'{"step": 1, "data": {"a": [1]}}',
        b"\xff",
        b"[]",
    ],
)
def test_lines_with_odd_values_name_the_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, (line|step) 1.*; remove the line"):
        read_jsonl(path)
