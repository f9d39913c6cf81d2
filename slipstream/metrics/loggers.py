"""Metric loggers: a JSON Lines file, the console, TensorBoard, trackers, or several at once.

Does not know what the numbers mean. Called by the loops: `check_loggers` before anything is
computed, `build_loggers` for each phase.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from slipstream.errors import CheckpointError, ConfigError, SlipstreamError, did_you_mean, name_of
from slipstream.metrics import tracker_mlflow, tracker_trackio, tracker_wandb
from slipstream.metrics.names import check_names, find
from slipstream.metrics.tracker import BackgroundLogger, require
from slipstream.reading import reading, shown

METRICS_FILE = "metrics.jsonl"
MetricsRow = Mapping[str, str | float]
"""One row of a table, as values by column. All rows of a table have the same columns."""

_log = logging.getLogger(__name__)


class MetricsLogger(Protocol):
    """Receives metrics. Within a phase, `step` never decreases from one call to the next."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TableLogger(Protocol):
    """A `MetricsLogger` that can also show tables."""

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        """Add the rows of `step` to the table `name`. Called before `log` of the same step."""


class JSONLLogger:
    """Writes one line `{"step": ..., "time": ..., "data": {...}}` per call, like verl.

    `time` is in seconds since 1970. Each line is on disk when `log` returns. An existing file is
    continued; an incomplete last line (from a crash) is removed first. Infinities and NaN are
    written as strings, because JSON has no such numbers; `read_jsonl` converts them back.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        data = {name: _to_json(value) for name, value in metrics.items()}
        line = {"step": step, "time": round(self._clock(), 3), "data": data}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        # Otherwise, after a power loss, a checkpoint could be newer than its log.
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Atomically drop the lines of later steps, which a resumed run will log again."""
        self._file.close()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as out:
                for line_step, line in _lines(self.path):
                    if line_step <= step:
                        out.write(line)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
            self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return (step, metrics) of every complete line; an incomplete last line is ignored.

    Raises CheckpointError, naming file and line, for any other line that cannot be read.
    """
    found = []
    for step, line in _lines(path):
        with reading(f"{path}, step {step}", CheckpointError, "remove the line"):
            data = json.loads(line)["data"]
            found.append((step, {name: float(value) for name, value in data.items()}))
    return found


class ConsoleLogger:
    """Prints one line per step with the headline metrics, or all metrics with `everything`."""

    def __init__(self, stream: TextIO | None = None, *, everything: bool = False) -> None:
        self._stream = stream
        self._everything = everything

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"step {step}"]
        for name, value in metrics.items():
            metric = find(name)
            if self._everything:
                parts.append(f"{name} {_short(value)}")
            elif metric is not None and metric.headline:
                # The data source distinguishes several validation sets.
                label = f"{name[9:]}" if name.startswith("val-core/") else metric.headline
                parts.append(f"{label} {_short(value)}")
        if len(parts) > 1:
            # sys.stdout is looked up at each call, because a progress bar may redirect it.
            print("  ".join(parts), file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class TensorBoardLogger:
    """Writes scalars and tables as TensorBoard event files, without torch.

    From `purge_step` on, TensorBoard hides the values of earlier event files in the folder,
    because a resumed run logs them again. Raises ConfigError if tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._text = require("tensorboard.plugins.text.metadata", "tensorboard")
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(folder))
        if purge_step is not None:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(purge_step, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        self._add(step, summary=self._summary.Summary(value=values))
        self._writer.flush()

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        """Write a 2-D text summary with the column names first; TensorBoard shows it as a table."""
        if not rows:
            return
        lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING", string_val=[cell.encode() for line in lines for cell in line]
        )
        for size in (len(lines), len(lines[0])):
            tensor.tensor_shape.dim.add(size=size)
        value = self._summary.Summary.Value(
            tag=name, tensor=tensor, metadata=self._text.create_summary_metadata(name, "")
        )
        self._add(step, summary=self._summary.Summary(value=[value]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


class TeeLogger:
    """Forwards metrics to several loggers, and tables to those that support them.

    A logger that fails is reported once and removed. `failures` has the reasons by the logger's
    `name` or class name. With `strict`, names missing in the table of metrics raise ValueError
    before any logger gets them.
    """

    def __init__(self, loggers: Sequence[MetricsLogger], *, strict: bool = False) -> None:
        self.loggers = list(loggers)
        self.failures: dict[str, str] = {}
        self._strict = strict

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._strict:
            check_names(metrics)
        for logger in list(self.loggers):
            self._supervise(logger, partial(logger.log, step, metrics))

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        for logger in list(self.loggers):
            if isinstance(logger, TableLogger):
                self._supervise(logger, partial(logger.log_table, step, name, rows))

    def close(self) -> None:
        for logger in list(self.loggers):
            self._supervise(logger, logger.close)

    def _supervise(self, logger: MetricsLogger, act: Callable[[], None]) -> None:
        """Run `act`. If it fails, remove the logger: logging must not end a run."""
        try:
            act()
        except Exception as error:
            self.loggers.remove(logger)
            self.report(getattr(logger, "name", type(logger).__name__), error)

    def report(self, name: str, error: Exception) -> None:
        """Record and print that a logger failed and was removed."""
        self.failures[name] = f"{type(error).__name__}: {error}"
        _log.warning("%s failed and receives no more metrics: %s", name, self.failures[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerContext:
    """Facts about the run for loggers.

    `run_dir` is the folder of the logged phase, `root` the run folder, shared by all phases.
    `resume_step` is the step of the checkpoint that the run resumed from, None for a new run.
    `config` is the resolved configuration. `notify` prints a line for the user.
    """

    run_dir: Path
    project_name: str
    experiment_name: str
    file_name: str = METRICS_FILE
    resume_step: int | None = None
    phase: str = "rl"
    root: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    notify: Callable[[str], None] = print

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir if self.root is None else self.root

    @property
    def run_name(self) -> str:
        """The name of the run in trackers. Each phase is a separate run there."""
        return self.experiment_name + ("" if self.phase == "rl" else f"-{self.phase}")

    def recorded(self, after: int) -> list[tuple[int, dict[str, float]]]:
        """Return logged metrics of the steps after `after`, up to and including `resume_step`."""
        path, last = self.run_dir / self.file_name, self.resume_step
        if last is None or not path.exists():
            return []
        return [(step, metrics) for step, metrics in read_jsonl(path) if after < step <= last]


LoggerFactory = Callable[[LoggerContext], MetricsLogger]
LOGGERS: dict[str, LoggerFactory] = {}
"""Logger factories by the name that `trainer.logger` uses."""

_CHECKS: dict[str, Callable[[Path], None]] = {}


def register_logger(
    name: str | Enum, *, check: Callable[[Path], None] | None = None
) -> Callable[[LoggerFactory], LoggerFactory]:
    """Return a decorator that registers a logger factory under `name`.

    `check` is called with the run folder before anything is computed. It raises ConfigError if the
    logger cannot work. Raises ConfigError if the name is already registered.
    """
    key = name_of(name, "logger")

    def register(factory: LoggerFactory) -> LoggerFactory:
        if key in LOGGERS:
            raise ConfigError(f"a logger named {key!r} is registered already; use another name")
        LOGGERS[key] = factory
        if check is not None:
            _CHECKS[key] = check
        return factory

    return register


@register_logger("console")
def _console(context: LoggerContext) -> MetricsLogger:
    return ConsoleLogger()


@register_logger("file")
def _file(context: LoggerContext) -> MetricsLogger:
    path = context.run_dir / context.file_name
    if context.resume_step is None:
        _set_aside(path)
    logger = JSONLLogger(path)
    if context.resume_step is not None:
        try:
            logger.truncate_after(context.resume_step)
        except BaseException:
            logger.close()
            raise
    return logger


def _check_tensorboard(folder: Path) -> None:
    require("tensorboard", "tensorboard")


@register_logger("tensorboard", check=_check_tensorboard)
def _tensorboard(context: LoggerContext) -> MetricsLogger:
    folder = context.run_dir / "tensorboard" / Path(context.file_name).stem
    step = context.resume_step
    return TensorBoardLogger(folder, purge_step=0 if step is None else step + 1)


@register_logger("wandb", check=tracker_wandb.check)
def _wandb(context: LoggerContext) -> MetricsLogger:
    return BackgroundLogger("wandb", context, tracker_wandb.start)


@register_logger("mlflow", check=tracker_mlflow.check)
def _mlflow(context: LoggerContext) -> MetricsLogger:
    return BackgroundLogger("mlflow", context, tracker_mlflow.start)


@register_logger("trackio", check=tracker_trackio.check)
def _trackio(context: LoggerContext) -> MetricsLogger:
    return BackgroundLogger("trackio", context, tracker_trackio.start)


_PROJECT_CHECKS: dict[str, Callable[[str], None]] = {
    tracker.NAME: tracker.check_project
    for tracker in (tracker_wandb, tracker_mlflow, tracker_trackio)
}


def check_loggers(names: Sequence[str], folder: Path, project_name: str | None = None) -> None:
    """Check that all named loggers can work in the run folder `folder`, for a project.

    Raises ConfigError for unknown loggers, missing packages, missing credentials, settings of a
    tracker that it does not understand, and names of projects that it cannot have.
    """
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(
                f"trainer.logger names {name!r}{did_you_mean(name, LOGGERS)} (known: "
                f"{', '.join(LOGGERS)}); slipstream.metrics.loggers.register_logger adds one"
            )
        remedy = f"correct it, or leave {name} out of trainer.logger"
        if name in _CHECKS:
            # Trackers read environment variables, and raise anything at values that are odd.
            with reading(f"trainer.logger={name}", ConfigError, remedy):
                _CHECKS[name](folder)
        if project_name is not None and name in _PROJECT_CHECKS:
            where = f"trainer.project_name={shown(project_name)} for trainer.logger={name}"
            with reading(where, ConfigError, "set another trainer.project_name"):
                _PROJECT_CHECKS[name](project_name)


def build_loggers(
    names: Sequence[str],
    run_dir: Path,
    project_name: str,
    experiment_name: str,
    *,
    file_name: str = METRICS_FILE,
    resume_step: int | None = None,
    strict: bool = False,
    phase: str = "rl",
    root: Path | None = None,
    config: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = print,
) -> TeeLogger:
    """Return the named loggers of `LOGGERS` as one logger for one phase.

    Most arguments are the fields of `LoggerContext`. The logger `file` writes `run_dir/file_name`;
    phases that share a folder need different file names. With `resume_step` the file continues
    after that step; without it, an existing file is renamed (`metrics.1.jsonl`). A logger that
    fails to start is reported and omitted. Raises ConfigError as `check_loggers` does, and
    CheckpointError if the existing file cannot be read.
    """
    context = LoggerContext(
        run_dir=run_dir,
        project_name=project_name,
        experiment_name=experiment_name,
        file_name=file_name,
        resume_step=resume_step,
        phase=phase,
        root=root,
        config=config or {},
        notify=notify,
    )
    check_loggers(names, context.folder, project_name)
    tee = TeeLogger([], strict=strict)
    for name in dict.fromkeys(names):
        try:
            tee.loggers.append(LOGGERS[name](context))
        except SlipstreamError:
            tee.close()
            raise
        except Exception as error:
            tee.report(name, error)
    return tee


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (step, line) of each line, except an incomplete last line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                _log.warning("%s, line %d, is incomplete and is not read", path, number)
                return
            what = f"{path}, line {number}, is not a metrics record"
            with reading(what, CheckpointError, "remove the line"):
                line = raw.decode()
                record = json.loads(line)
                if not isinstance(record["data"], dict):
                    raise TypeError("data is not an object")
                step = int(record["step"])
            yield step, line


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        torn = file.seek(0, os.SEEK_END) - end
        if torn:
            # Its process died while it wrote the line.
            _log.warning("%s: removed an incomplete last line of %d bytes", path, torn)
            file.truncate(end)


def _set_aside(path: Path) -> None:
    """Rename an existing file to the first free name of `name.1.jsonl`, `name.2.jsonl`, ..."""
    if not path.exists():
        return
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)


def _to_json(value: float) -> float | str:
    value = float(value) if not isinstance(value, int) else value
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _short(value: float) -> str:
    """Format with four significant digits; integers without a decimal point."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"
