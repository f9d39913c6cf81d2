"""Weights & Biases logger: `trainer.logger=[wandb]`.

Each phase is a separate run, because SFT and RL both count steps from 1. The group is
`trainer.experiment_name`, the job type is the phase. W&B's environment variables take precedence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.metrics.tracker import CLOSE_SECONDS, TrackedRun, require
from slipstream.reading import reason, shown

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

NAME = "wandb"


def check(folder: Path) -> None:
    """Check package and credentials without ever prompting.

    Raises ConfigError if wandb is missing or there are no credentials for the server.
    """
    wandb = require("wandb", NAME)
    with _reading_variables():
        settings = wandb.setup(_settings(wandb)).settings
    if settings.mode in ("offline", "disabled") or wandb.run is not None:
        return
    try:
        known = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise ConfigError(
            f"trainer.logger names wandb, but its credentials are malformed: {error}"
        ) from error
    if not known:
        raise ConfigError(
            f"trainer.logger names wandb, but there is no API key for {settings.base_url}: run "
            "`wandb login` or set WANDB_API_KEY; with WANDB_MODE=offline the run is logged to its "
            "folder, and `wandb sync` sends it later"
        )


def check_project(name: str) -> None:
    """Raise ValueError if W&B cannot have a project of this name."""
    require("wandb", NAME).Settings(project=name)


class WandbTracker:
    """A W&B run, online or offline depending on W&B's own settings."""

    def __init__(self, context: LoggerContext, run: TrackedRun) -> None:
        self._wandb = wandb = require("wandb", NAME)
        environ = os.environ
        self._run = wandb.init(
            project=context.project_name,
            name=context.run_name,
            group=None if "WANDB_RUN_GROUP" in environ else context.experiment_name,
            job_type=None if "WANDB_JOB_TYPE" in environ else context.phase,
            dir=None if "WANDB_DIR" in environ else str(context.run_dir),
            id=run.id,
            resume=None if run.id is None else "allow",
            config=dict(context.config),
            allow_val_change=True,
            # Does not take over a W&B run that other code in this process has open.
            reinit="create_new",
            settings=_settings(wandb),
        )
        run.id = self._run.id
        if self._run.offline:
            # W&B writes asynchronously: rewrite what a killed process may not have written.
            if context.resume_step is not None:
                run.step = min(run.step, context.resume_step)
            # Each resumed process writes its own folder.
            folders = Path(self._run.settings.wandb_dir) / f"offline-run-*-{run.id}"
            context.notify(f"wandb: offline; to send the run later: wandb sync {folders}")
        else:
            # Resend what did not reach the server before a crash.
            run.step = self._run.starting_step - 1
            if self._run.url is not None:
                context.notify(f"wandb: {self._run.url}")
        self._tables: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        """Append `rows` to the table `name` and send the whole table of this process.

        Not in increments (`log_mode="INCREMENTAL"`): each increment would wait until the server
        has the previous one, and without a network connection metrics would wait as well.
        """
        if not rows:
            return
        table = self._tables.get(name)
        if table is None:
            columns = list(rows[0])
            table = self._wandb.Table(columns=columns, log_mode="MUTABLE")
            self._tables[name] = table
        for row in rows:
            table.add_data(*row.values())
        self._run.log({name: table}, step=step, commit=False)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def start(context: LoggerContext) -> tuple[WandbTracker, TrackedRun]:
    run = TrackedRun.recall(context, NAME)
    return WandbTracker(context, run), run


def _settings(wandb: Any) -> Any:
    """Return W&B's settings: no output, because a progress bar is shown, and a time limit."""
    chosen: dict[str, Any] = {
        "WANDB_SILENT": ("silent", True),
        "WANDB_CONSOLE": ("console", "off"),
        # Shorter than the wait for the thread, so that W&B can report the problem.
        "WANDB_FINISH_TIMEOUT": ("finish_timeout", CLOSE_SECONDS - 5),
        "WANDB_FINISH_TIMEOUT_RAISES": ("finish_timeout_raises", True),
    }
    return wandb.Settings(
        **dict(setting for name, setting in chosen.items() if name not in os.environ)
    )


@contextlib.contextmanager
def _reading_variables() -> Iterator[None]:
    """Turn what W&B raises at its environment variables into a ConfigError that names them."""
    try:
        yield
    except Exception as error:
        # W&B checks them with pydantic, whose message has several lines.
        details: Sequence[Mapping[str, Any]] = getattr(error, "errors", list)()
        problems = "; ".join(map(_problem, details)) or reason(error)
        raise ConfigError(
            f"trainer.logger=wandb: {problems}; correct or unset the environment variable"
        ) from error


def _problem(detail: Mapping[str, Any]) -> str:
    """Return what pydantic reports of a setting, with the environment variable."""
    value, field = str(detail.get("input")), str(next(iter(detail.get("loc", ())), ""))
    ours = {n: v for n, v in sorted(os.environ.items()) if n.startswith("WANDB_")}
    # A list comes from a text with commas.
    names = [n for n, v in ours.items() if v == value or (v and f"'{v}'" in value)]
    name = names[0] if names else f"WANDB_{field.upper()}"
    secret = any(word in name for word in ("KEY", "TOKEN", "PASSWORD"))
    return f"{name}{'' if secret else f'={shown(value)}'}: {detail.get('msg')}"
