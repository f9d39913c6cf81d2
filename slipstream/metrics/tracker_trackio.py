"""Trackio: `trainer.logger=[trackio]`.

`trainer.project_name` is the project; each phase is a run of its own in the group
`trainer.experiment_name`. Without TRACKIO_DIR the data are in the run folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.metrics.tracker import TrackedRun, require

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

NAME = "trackio"
_DIR = "TRACKIO_DIR"
_SPACE, _SERVER, _TOKEN = "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"


def check(folder: Path) -> None:
    """Refuse a missing package, one that is bound to another folder, and a Space or server without
    credentials for it.

    Raises ConfigError.
    """
    _load(folder)
    space, server = os.environ.get(_SPACE), os.environ.get(_SERVER)
    if space and require("huggingface_hub", NAME).get_token() is None:
        raise ConfigError(
            f"trainer.logger names trackio and {_SPACE}={space}, and there is no token of Hugging "
            f"Face: run `hf auth login` or set HF_TOKEN, or unset {_SPACE} to log to a folder"
        )
    if server and not space and not os.environ.get(_TOKEN) and "write_token=" not in server:
        raise ConfigError(
            f"trainer.logger names trackio and {_SERVER} without the server's write token: set "
            f"{_TOKEN}, or unset {_SERVER} to log to a folder"
        )


class TrackioTracker:
    """A run of a Trackio project: in a folder, or on the Space or server that Trackio's environment
    variables name."""

    def __init__(self, context: LoggerContext, run: TrackedRun) -> None:
        self._trackio = trackio = _load(context.folder)

        def begin(resume: str) -> Any:
            return trackio.init(
                project=context.project_name,
                name=context.run_name,
                group=context.experiment_name,
                config=dict(context.config),
                resume=resume,
                embed=False,
            )

        with _silent(trackio):
            self._run = begin("never" if run.id is None else "allow")
            if run.id is not None and self._run.id != run.id:
                # Trackio knows runs by their names: this one is another folder's, or new.
                self._run.finish()
                self._run = begin("never")
                run.step = -1
        run.id = self._run.id
        context.notify(f"trackio: {_place(context.project_name, context.folder)}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        self._run.log({name: self._trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def finish(self, *, failed: bool) -> None:
        with _silent(self._trackio):
            self._run.finish()


def start(context: LoggerContext) -> tuple[TrackioTracker, TrackedRun]:
    run = TrackedRun.recall(context, NAME, os.environ.get(_SPACE) or os.environ.get(_DIR) or "")
    return TrackioTracker(context, run), run


def _load(folder: Path) -> Any:
    """The package, which reads its folder once, when it is imported. Raises ConfigError."""
    wanted = Path(os.environ.get(_DIR) or (folder / NAME).resolve())
    ours = not os.environ.get(_DIR)
    if ours and NAME not in sys.modules:
        os.environ[_DIR] = str(wanted)
    try:
        trackio = require("trackio", NAME)
    finally:
        if ours:
            os.environ.pop(_DIR, None)
    if wanted != trackio.utils.TRACKIO_DIR:
        raise ConfigError(
            "trainer.logger names trackio, which keeps to the folder that it had when this process "
            f"imported it, {trackio.utils.TRACKIO_DIR}, and not to {wanted}; run in a process of "
            f"its own, or with {_DIR} set"
        )
    return trackio


def _place(project: str, folder: Path) -> str:
    """Where the metrics are; for a folder, the command that shows them."""
    if space := os.environ.get(_SPACE):
        return f"Space {space}"
    if os.environ.get(_SERVER):
        return f"the server that {_SERVER} names"
    show = f"trackio show --project {shlex.quote(project)}"
    if os.environ.get(_DIR):
        return show
    return f"{_DIR}={shlex.quote(str((folder / NAME).resolve()))} {show}"


@contextlib.contextmanager
def _silent(trackio: Any) -> Iterator[None]:
    """Without what Trackio prints: lines amid a run's, and a command that looks in another folder.

    Its `print` alone: the process has one standard output, and other threads write to it.
    """
    modules = [vars(module) for module in (trackio, trackio.run, trackio.utils)]
    try:
        for names in modules:
            names["print"] = lambda *values, **options: None
        yield
    finally:
        for names in modules:
            names.pop("print", None)
