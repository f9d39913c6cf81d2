"""Weights & Biases: `trainer.logger=[wandb]`.

Each phase is a run of its own (SFT and RL both count from step 1), of `trainer.experiment_name` as
group and the phase as job type. W&B's environment variables come before what is chosen here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.metrics.tracker import CLOSE_SECONDS, TrackedRun, require

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

NAME = "wandb"


def check(folder: Path) -> None:
    """Refuse a missing package, and a server without credentials for it: never a prompt.

    Raises ConfigError.
    """
    wandb = require("wandb", NAME)
    settings = wandb.setup(_settings(wandb)).settings
    if settings.mode in ("offline", "disabled") or wandb.run is not None:
        return
    try:
        known = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise ConfigError(
            f"trainer.logger names wandb, and its credentials are malformed: {error}"
        ) from error
    if not known:
        raise ConfigError(
            f"trainer.logger names wandb, and there is no API key for {settings.base_url}: run "
            "`wandb login` or set WANDB_API_KEY; with WANDB_MODE=offline the run is logged to its "
            "folder, and `wandb sync` sends it later"
        )


class WandbTracker:
    """A W&B run, online or offline as W&B's own settings say."""

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
            # Whoever else uses W&B in this process keeps the run that he has.
            reinit="create_new",
            settings=_settings(wandb),
        )
        run.id = self._run.id
        if self._run.offline:
            # W&B writes behind: what a killed process left out is written again.
            if context.resume_step is not None:
                run.step = min(run.step, context.resume_step)
            # Each process that goes on has a folder of its own.
            folders = Path(self._run.settings.wandb_dir) / f"offline-run-*-{run.id}"
            context.notify(f"wandb: offline; to send the run later: wandb sync {folders}")
        else:
            # What did not reach the server before a crash is sent again.
            run.step = self._run.starting_step - 1
            if self._run.url is not None:
                context.notify(f"wandb: {self._run.url}")
        self._tables: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        """Append `rows` to the table `name` and send it whole, with the rows of this process.

        Not in increments (`log_mode="INCREMENTAL"`): each would wait until the server has the one
        before, and without a network metrics would wait with it.
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
    """W&B's settings: silent, since a progress bar is on the screen, and with an end."""
    chosen: dict[str, Any] = {
        "WANDB_SILENT": ("silent", True),
        "WANDB_CONSOLE": ("console", "off"),
        # A little earlier than the thread is given up: W&B says what happened.
        "WANDB_FINISH_TIMEOUT": ("finish_timeout", CLOSE_SECONDS - 5),
        "WANDB_FINISH_TIMEOUT_RAISES": ("finish_timeout_raises", True),
    }
    return wandb.Settings(
        **dict(setting for name, setting in chosen.items() if name not in os.environ)
    )
