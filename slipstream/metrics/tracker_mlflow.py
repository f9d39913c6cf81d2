"""MLflow logger: `trainer.logger=[mlflow]`.

`trainer.project_name` is the experiment; each phase is a separate run. If MLFLOW_TRACKING_URI is
not set, it logs to an SQLite database in the run folder, which `mlflow ui` opens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.tree import leaves
from slipstream.metrics.tracker import TrackedRun, require

if TYPE_CHECKING:
    from slipstream.metrics.loggers import LoggerContext, MetricsRow

NAME = "mlflow"
PARAM_CHARACTERS = 6000
"""Maximum length of a parameter value in MLflow."""

NAME_CHARACTERS = 500
"""Maximum length of the name of an experiment in MLflow."""

_BATCH = 100
"""Maximum number of parameters or metrics per MLflow request."""

_URI = "MLFLOW_TRACKING_URI"
_DEFAULTS = {
    # Otherwise MLflow reports its use to a server of its vendor.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Otherwise MLflow shows its own progress bar for each table.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_SHORT_TIMEOUTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Settings for the first requests, so that a wrong address is reported within seconds. Later
requests use MLflow's defaults (minutes), because a restarted server comes back."""


def check(folder: Path) -> None:
    """Check that all needed packages are installed. Raises ConfigError."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    require("mlflow", NAME)
    require("pandas", NAME)
    if _is_database(os.environ.get(_URI, "sqlite:")):
        require("sqlalchemy", NAME)
        require("alembic", NAME)
    # Otherwise MLflow logs each table that it creates in a new database.
    logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)


def check_project(name: str) -> None:
    """Raise ValueError if MLflow cannot have an experiment of this name."""
    if not 1 <= len(name) <= NAME_CHARACTERS:
        raise ValueError(f"an experiment's name has 1 to {NAME_CHARACTERS} characters")


class MLflowTracker:
    """A run of an MLflow experiment, on a server or in a database."""

    def __init__(self, context: LoggerContext, run: TrackedRun) -> None:
        self._entities = require("mlflow.entities", NAME)
        self._pandas = require("pandas", NAME)
        uri, artifacts = run.where, None
        if not uri:
            home = (context.folder / NAME).resolve()
            home.mkdir(parents=True, exist_ok=True)
            paths: Any = require("mlflow.utils.file_utils", NAME)
            uri = paths.path_to_local_sqlite_uri(home / "mlflow.db")
            artifacts = (home / "artifacts").as_uri()
        with _environment(_SHORT_TIMEOUTS):
            self._client = require("mlflow", NAME).MlflowClient(tracking_uri=uri)
            experiment = self._experiment(context.project_name, artifacts)
            if run.id is None:
                run.id = self._create(experiment, context)
            else:
                self._client.update_run(run.id, status="RUNNING")
        self._id = run.id
        context.notify(
            f"mlflow: {uri}"
            if artifacts is None
            else f"mlflow: mlflow ui --backend-store-uri {uri}"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [
            self._entities.Metric(key(name), float(value), now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(entries), _BATCH):
            self._client.log_batch(self._id, metrics=entries[first : first + _BATCH])

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        """Append `rows` to the artifact `name`.json."""
        # With dtype object, because MLflow warns about pandas' string type.
        table = self._pandas.DataFrame(list(rows), dtype=object)
        self._client.log_table(self._id, table, f"{name}.json")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _create(self, experiment: str, context: LoggerContext) -> str:
        tags = {"experiment_name": context.experiment_name, "phase": context.phase}
        run = self._client.create_run(experiment, run_name=context.run_name, tags=tags)
        created = str(run.info.run_id)
        params = [self._entities.Param(key(k), _text(v)) for k, v in leaves(context.config)]
        for first in range(0, len(params), _BATCH):
            self._client.log_batch(created, params=params[first : first + _BATCH])
        if params:
            self._client.log_dict(created, dict(context.config), "config.yaml")
        return created


def start(context: LoggerContext) -> tuple[MLflowTracker, TrackedRun]:
    run = TrackedRun.recall(context, NAME, os.environ.get(_URI, ""))
    return MLflowTracker(context, run), run


def key(name: str) -> str:
    """Return `name` with only characters that MLflow allows; `@` becomes `_at_`, as in verl."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _text(value: Any) -> str:
    """Return a value as in config.yaml, cut to the maximum length of MLflow."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:PARAM_CHARACTERS]


def _is_database(uri: str) -> bool:
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", "mysql", "postgresql", "mssql")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the body, except those that are already set."""
    absent = [name for name in values if name not in os.environ]
    try:
        os.environ.update({name: values[name] for name in absent})
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)
