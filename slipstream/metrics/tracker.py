"""What the loggers of experiment trackers (W&B, MLflow, Trackio) share.

A tracker may be a server that is slow or gone. Its calls are made on a thread of their own, so that
training never waits for it, and the end of a run waits for it no longer than `CLOSE_SECONDS`. Which
of its runs belongs to a run folder is kept there, so that a resumed run goes on in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

CLOSE_SECONDS = 30.0
"""How long the end of a phase waits for what is still on its way to a tracker."""

RUN_FILE = "run.json"


class Tracker(Protocol):
    """One run of an experiment tracker. Called from one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None: ...

    def finish(self, *, failed: bool) -> None:
        """End the run, as a failed one or a finished one."""


@dataclass(slots=True)
class TrackedRun:
    """The tracker's run that a phase of a run folder is logged to, kept in a file of that folder.

    `step` is the last one that it has, -1 for none; `where` tells servers apart: an `id` means
    nothing on another one.
    """

    path: Path
    where: str
    id: str | None = None
    step: int = -1

    @classmethod
    def recall(cls, context: LoggerContext, tracker: str, where: str = "") -> TrackedRun:
        """The run to go on with where `context` is a resumed run's, else one without an id.

        Raises ValueError for a file that cannot be read.
        """
        path = context.run_dir / tracker / RUN_FILE
        run = cls(path=path, where=where)
        if context.resume_step is None or not path.exists():
            return run
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["where"] == where:
                run.id, run.step = str(saved["id"]), int(saved["step"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read ({error!r}); remove it to log to a new run of {tracker}"
            ) from error
        return run

    def save(self) -> None:
        """Replace the file in one rename."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        content = {"id": self.id, "step": self.step, "where": self.where}
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


class BackgroundLogger:
    """A logger whose calls a tracker gets in order, on a daemon thread: none of them waits.

    `start` begins or continues the tracker's run, also on that thread, and completes the
    `TrackedRun`. Steps that a continued run has are not sent again: trackers keep what they were
    told first. Those that it lacks are sent from the file of metrics, where there is one. What
    fails there is raised by the next call here, and nothing is sent any more.
    """

    def __init__(
        self,
        name: str,
        context: LoggerContext,
        start: Callable[[LoggerContext], tuple[Tracker, TrackedRun]],
        *,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.name = name
        self._context, self._start = context, start
        self._close_seconds = close_seconds
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._run_failed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = dict(metrics)
        self._put(_Call(step, lambda tracker: tracker.log(step, values), completes=True))

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        copied = [dict(row) for row in rows]
        self._put(_Call(step, lambda tracker: tracker.log_table(step, name, copied)))

    def close(self) -> None:
        """Wait for what is on its way. Raises what failed, or TimeoutError."""
        # Called on the way out of a run that may have failed.
        self._run_failed = sys.exc_info()[0] is not None
        self._calls.put(None)
        self._thread.join(self._close_seconds)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(
                f"not everything was sent {self._close_seconds:g} s after the end; what is "
                "missing there is in metrics.jsonl, with trainer.logger=[file,...]"
            )

    def _put(self, call: _Call) -> None:
        self._raise_error()
        self._calls.put(call)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            tracker, run = self._start(self._context)
            try:
                self._serve(tracker, run)
            except BaseException:
                with contextlib.suppress(Exception):
                    tracker.finish(failed=True)
                raise
            tracker.finish(failed=self._run_failed)
        except Exception as error:
            self._error = error
        except BaseException as error:  # not one that ends the run, where it is raised
            self._error = RuntimeError(repr(error))

    def _serve(self, tracker: Tracker, run: TrackedRun) -> None:
        run.save()
        context, had = self._context, run.step
        if context.resume_step is not None and had > context.resume_step:
            context.notify(
                f"{self.name}: steps {context.resume_step + 1} to {had} are in its run already and "
                "stay as they are there"
            )
        # What a process that was killed did not get round to, or another tracker was told.
        for step, metrics in context.recorded(had):
            tracker.log(step, metrics)
            run.step = step
            run.save()
        while (call := self._calls.get()) is not None:
            if call.step <= had:
                continue
            call.act(tracker)
            if call.completes:
                run.step = call.step
                run.save()


@dataclass(frozen=True, slots=True)
class _Call:
    step: int
    act: Callable[[Tracker], None]
    completes: bool = False
    """Whether the step is all there after it."""


def require(module: str, extra: str) -> Any:
    """The optional module that a logger needs. Raises ConfigError naming the extra that has it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {extra}, but the package is missing ({error}); "
            f"run: pip install 'slipstream-rl[{extra}]'"
        ) from error
