"""Trackio logger: `trainer.logger=[trackio]`.

`trainer.project_name` is the project; each phase is a separate run in the group
`trainer.experiment_name`. If TRACKIO_DIR is not set, the data are stored in the run folder.
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
NAME_BYTES = 200
"""Maximum length of a project's name. File names have at most 255 bytes, with their suffixes."""

_DIR = "TRACKIO_DIR"
_SPACE, _SERVER, _TOKEN = "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"


def check(folder: Path) -> None:
    """Check package and credentials.

    Raises ConfigError if trackio is missing or already uses another folder, or if the credentials
    of the chosen Space or server are missing.
    """
    _load(folder)
    space, server = os.environ.get(_SPACE), os.environ.get(_SERVER)
    if space and require("huggingface_hub", NAME).get_token() is None:
        raise ConfigError(
            f"trainer.logger names trackio and {_SPACE}={space}, but there is no Hugging Face "
            f"token: run `hf auth login` or set HF_TOKEN, or unset {_SPACE} to log to a folder"
        )
    if server and not space and not os.environ.get(_TOKEN) and "write_token=" not in server:
        raise ConfigError(
            f"trainer.logger names trackio and {_SERVER} without the server's write token: set "
            f"{_TOKEN}, or unset {_SERVER} to log to a folder"
        )


def check_project(name: str) -> None:
    """Raise ValueError if Trackio cannot have a project of this name, which names its files."""
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"a project's name has at most {NAME_BYTES} bytes")


class TrackioTracker:
    """A run of a Trackio project, in a folder, on a Space, or on a server.

    Trackio's environment variables select which one.
    """

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
                # Trackio finds runs by name; this one belongs to another folder, or is new.
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
    """Import trackio with its folder set; it reads TRACKIO_DIR only at import.

    Raises ConfigError if it was imported before with another folder.
    """
    expected = Path(os.environ.get(_DIR) or (folder / NAME).resolve())
    ours = not os.environ.get(_DIR)
    if ours and NAME not in sys.modules:
        os.environ[_DIR] = str(expected)
    try:
        trackio = require("trackio", NAME)
    finally:
        if ours:
            os.environ.pop(_DIR, None)
    if expected != trackio.utils.TRACKIO_DIR:
        raise ConfigError(
            "trainer.logger names trackio, but this process imported it with the folder "
            f"{trackio.utils.TRACKIO_DIR}, which it cannot change to {expected}; run in a new "
            f"process, or with {_DIR} set"
        )
    return trackio


def _place(project: str, folder: Path) -> str:
    """Return where the metrics are; for a folder, the command that shows them."""
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
    """Suppress what Trackio prints: text between the lines of a run, and a wrong command.

    Only the `print` of its modules is replaced, because other threads use standard output too.
    """
    modules = [vars(module) for module in (trackio, trackio.run, trackio.utils)]
    try:
        for names in modules:
            names["print"] = lambda *values, **options: None
        yield
    finally:
        for names in modules:
            names.pop("print", None)
