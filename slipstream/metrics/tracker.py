"""Common code of the experiment tracker loggers (W&B, MLflow, Trackio).

A tracker may be a slow or unreachable server. It is called in a separate thread, so training never
waits for it, and the end of a run waits at most `CLOSE_SECONDS`. The run folder records the id of
its tracker run, so a resumed run continues the same tracker run.
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
from slipstream.reading import reading, shown

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

CLOSE_SECONDS = 30.0
"""Maximum seconds that the end of a phase waits for data still being sent to a tracker."""

RUN_FILE = "run.json"


class Tracker(Protocol):
    """One run of an experiment tracker. All methods are called from one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None: ...

    def finish(self, *, failed: bool) -> None:
        """End the run, marked as failed or finished."""


@dataclass(slots=True)
class TrackedRun:
    """The tracker run that belongs to a phase of a run folder, saved in a file of that folder.

    `step` is the last step that the tracker has, -1 for none. `where` identifies the server, since
    an `id` is valid on one server only.
    """

    path: Path
    where: str
    id: str | None = None
    step: int = -1

    @classmethod
    def recall(cls, context: LoggerContext, tracker: str, where: str = "") -> TrackedRun:
        """Return the saved tracker run if `context` is a resumed run, else one without an id.

        Raises ConfigError if the file cannot be read.
        """
        path = context.run_dir / tracker / RUN_FILE
        run = cls(path=path, where=where)
        if context.resume_step is None or not path.exists():
            return run
        remedy = f"remove it to log to a new run of {tracker}"
        with reading(f"{path} cannot be read", ConfigError, remedy):
            saved = json.loads(path.read_text(encoding="utf-8"))
            known, step = saved["id"], saved["step"]
            if not isinstance(known, str | None) or type(step) is not int or step < -1:
                raise ValueError(f"id={shown(known)} must be text, and step={shown(step)} a step")
            if saved["where"] == where:
                run.id, run.step = known, step
        return run

    def save(self) -> None:
        """Replace the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        content = {"id": self.id, "step": self.step, "where": self.where}
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


class BackgroundLogger:
    """Forwards calls to a tracker in order, in a daemon thread. No call blocks the caller.

    `start` creates or continues the tracker run, in the same thread, and fills in the `TrackedRun`.
    Steps that a continued run already has are not sent again, because trackers keep the first
    value. Missing steps are sent from the metrics file, if it exists. An error in the thread is
    raised by the next call, and nothing more is sent.
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
        """Wait until everything is sent. Raises the error of the thread, or TimeoutError."""
        # An exception in flight means that the run failed.
        self._run_failed = sys.exc_info()[0] is not None
        self._calls.put(None)
        self._thread.join(self._close_seconds)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(
                f"not everything was sent within {self._close_seconds:g} s of the end; with "
                "trainer.logger=[file,...] the missing values are in metrics.jsonl"
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
        except BaseException as error:  # raised later in the caller, where it must not end the run
            self._error = RuntimeError(repr(error))

    def _serve(self, tracker: Tracker, run: TrackedRun) -> None:
        run.save()
        context, last_sent = self._context, run.step
        if context.resume_step is not None and last_sent > context.resume_step:
            context.notify(
                f"{self.name}: steps {context.resume_step + 1} to {last_sent} are already in its "
                "run and are not sent again"
            )
        # Steps that a killed process did not send, or that were logged to another tracker.
        for step, metrics in context.recorded(last_sent):
            tracker.log(step, metrics)
            run.step = step
            run.save()
        while (call := self._calls.get()) is not None:
            if call.step <= last_sent:
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
    """Whether the step is complete after this call."""


def require(module: str, extra: str) -> Any:
    """Return the optional module. Raises ConfigError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {extra}, but the package is missing ({error}); "
            f"run: pip install 'slipstream-rl[{extra}]'"
        ) from error
