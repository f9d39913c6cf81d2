"""Where metrics go: a JSON Lines file, the console, TensorBoard, or several at once.

Knows nothing of what the numbers mean. Called by the loops; `build_loggers` is the way in.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from slipstream.errors import CheckpointError, ConfigError, did_you_mean
from slipstream.metrics.names import check_names, find

METRICS_FILE = "metrics.jsonl"
_log = logging.getLogger(__name__)


class MetricsLogger(Protocol):
    """A place that metrics go to. `step` never decreases between two calls of one phase."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JSONLLogger:
    """One line `{"step": ..., "data": {...}}` a call, as VERL's file logger writes, with the time
    (`"time"`, seconds since 1970).

    Every line is on disk when `log` returns. Appends to an existing file; a last line that a crash
    tore off is removed first. Infinities and NaN are written as strings, since JSON has no numbers
    for them; `read_jsonl` turns them back.
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
        # A checkpoint that survives a power loss must not be ahead of its log.
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop all lines of later steps, in one rename: what a resumed run will log again."""
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
    """`(step, metrics)` of every whole line; a torn last line is left out.

    Raises CheckpointError naming file and line for any other line that cannot be read.
    """
    return [
        (step, {name: float(value) for name, value in json.loads(line)["data"].items()})
        for step, line in _lines(path)
    ]


class ConsoleLogger:
    """One short line a step with the headline metrics of the table, or all with `everything`."""

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
                # The source tells several validation sets apart.
                label = f"{name[9:]}" if name.startswith("val-core/") else metric.headline
                parts.append(f"{label} {_short(value)}")
        if len(parts) > 1:
            # Looked up at each call: a progress bar redirects sys.stdout while it is shown.
            print("  ".join(parts), file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class TensorBoardLogger:
    """Scalars as TensorBoard event files, without torch.

    `purge_step`: hide what earlier event files of the folder hold from this step on (a resumed
    run logs it again). Raises ConfigError where the package tensorboard is missing.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        try:
            self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError as error:
            raise ConfigError(
                "trainer.logger names tensorboard, but the package is missing "
                f"({error}); run: pip install 'slipstream-rl[tensorboard]'"
            ) from error
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

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


class TeeLogger:
    """Passes metrics on to several loggers. One that fails is reported once and dropped.

    `failures` keeps the reasons by class name. `strict` refuses names that the table of metrics
    does not have (ValueError), before any logger sees them.
    """

    def __init__(self, loggers: Sequence[MetricsLogger], *, strict: bool = False) -> None:
        self.loggers = list(loggers)
        self.failures: dict[str, str] = {}
        self._strict = strict

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._strict:
            check_names(metrics)
        for logger in list(self.loggers):
            self._supervise(logger, lambda to: to.log(step, metrics))

    def close(self) -> None:
        for logger in list(self.loggers):
            self._supervise(logger, lambda to: to.close())

    def _supervise(self, logger: MetricsLogger, act: Callable[[MetricsLogger], None]) -> None:
        """Training is worth more than its log: any failure ends the logger, not the run."""
        try:
            act(logger)
        except Exception as error:
            name = type(logger).__name__
            self.failures[name] = f"{type(error).__name__}: {error}"
            self.loggers.remove(logger)
            _log.warning("%s failed and gets no more metrics: %s", name, self.failures[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerContext:
    """What a logger may want to know of its run.

    `resume_step`: the step of the checkpoint that a resumed run goes on from, None for a new run.
    """

    run_dir: Path
    project_name: str
    experiment_name: str
    file_name: str = METRICS_FILE
    resume_step: int | None = None


LOGGERS: dict[str, Callable[[LoggerContext], MetricsLogger]] = {}
"""Logger factories by the name that `trainer.logger` uses."""


def register_logger(
    name: str,
) -> Callable[[Callable[[LoggerContext], MetricsLogger]], Callable[[LoggerContext], MetricsLogger]]:
    """Decorator: make a factory known under `name`. Raises ConfigError where it is taken."""

    def register(
        factory: Callable[[LoggerContext], MetricsLogger],
    ) -> Callable[[LoggerContext], MetricsLogger]:
        if name in LOGGERS:
            raise ConfigError(f"a logger named {name!r} is registered already; use another name")
        LOGGERS[name] = factory
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
        logger.truncate_after(context.resume_step)
    return logger


@register_logger("tensorboard")
def _tensorboard(context: LoggerContext) -> MetricsLogger:
    folder = context.run_dir / "tensorboard" / Path(context.file_name).stem
    step = context.resume_step
    return TensorBoardLogger(folder, purge_step=0 if step is None else step + 1)


def build_loggers(
    names: Sequence[str],
    run_dir: Path,
    project_name: str,
    experiment_name: str,
    *,
    file_name: str = METRICS_FILE,
    resume_step: int | None = None,
    strict: bool = False,
) -> TeeLogger:
    """The loggers called `names` (console, file, tensorboard, or registered ones) as one.

    `file` writes `run_dir/file_name`; each phase with steps of its own needs its own `file_name`.
    With `resume_step` the record continues after that step; without, an earlier record is kept
    under another name (`metrics.1.jsonl`). Raises ConfigError for an unknown name.
    """
    context = LoggerContext(
        run_dir=run_dir,
        project_name=project_name,
        experiment_name=experiment_name,
        file_name=file_name,
        resume_step=resume_step,
    )
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise ConfigError(
            f"trainer.logger names {unknown[0]!r}{did_you_mean(unknown[0], LOGGERS)} (known: "
            f"{', '.join(LOGGERS)}); slipstream.metrics.loggers.register_logger adds one"
        )
    return TeeLogger([LOGGERS[name](context) for name in dict.fromkeys(names)], strict=strict)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """`(step, line)` of each line; a last line without its end is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                if not isinstance(record["data"], dict):
                    raise TypeError("data is not an object")
                step = int(record["step"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path}, line {number}, is no record of metrics ({error!r}); remove the line"
                ) from error
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
        file.truncate(end)


def _set_aside(path: Path) -> None:
    """Rename an earlier record to the first free `name.1.jsonl`, `name.2.jsonl`, ..."""
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
    """Four significant digits; integers whole."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"
