"""Tracker loggers with the real W&B, MLflow and Trackio libraries, without a network."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.config.tree import leaves
from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics import loggers, tracker_mlflow, tracker_wandb
from slipstream.metrics.loggers import (
    LOGGERS,
    LoggerContext,
    MetricsRow,
    TableLogger,
    TeeLogger,
    build_loggers,
    check_loggers,
)
from slipstream.metrics.tracker import RUN_FILE, BackgroundLogger, TrackedRun, Tracker
from tests.metrics.trackers import (
    imported_trackio,
    mlflow_client,
    mlflow_history,
    run_id,
    trackio_rows,
    wandb_run,
    wandb_table,
    without_user_account,
)
from tests.metrics.wandb_server import wandb_server

# SQLAlchemy warns about MLflow's queries.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

CONFIG = {"trainer": {"seed": 1, "logger": ["wandb"]}, "data": {"path": None, "kwargs": {}}}
UNREACHABLE = "http://127.0.0.1:9"
"""An address on this machine on which no server listens."""


def rows(step: int) -> list[dict[str, str | float]]:
    return [
        {"step": step, "prompt": f"{step} + {n} = ?", "response": f"é | {n}\n", "score": n / 2}
        for n in range(2)
    ]


@pytest.fixture(autouse=True)
def isolated_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    without_user_account(tmp_path / "home", monkeypatch)


@pytest.fixture
def wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    # Its service process keeps the environment of its start.
    wandb.teardown()


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return imported_trackio(tmp_path_factory.mktemp("trackio"), monkeypatch)


def tee_of(name: str, folder: Path, *, resume: int | None = None, phase: str = "rl") -> TeeLogger:
    return build_loggers(
        [name, "file"],
        folder if phase == "rl" else folder / phase,
        "project",
        "experiment",
        resume_step=resume,
        phase=phase,
        root=folder,
        config=CONFIG,
        notify=lambda text: None,
    )


def log_steps(tee: TeeLogger, *steps: int) -> None:
    """Log each step with a table; then assert that there are no failures or remaining threads."""
    with closing(tee):
        for step in steps:
            tee.log_table(step, "val/generations", rows(step))
            tee.log(step, {"actor/lr": step / 4, "val-core/a/acc/mean@1": math.nan})
    assert tee.failures == {}
    assert [t.name for t in threading.enumerate() if t.name.startswith("logger-")] == []


# W&B


def test_wandb_offline_run_has_the_logged_values(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(tee_of("wandb", tmp_path, phase="sft"), 1)
    log_steps(tee_of("wandb", tmp_path), 0, 2)
    wandb.teardown()  # as at the end of a process, so that its service writes everything
    (first,) = (tmp_path / "wandb").glob("offline-run-*")
    run, steps, ends = wandb_run(first)
    assert (run.project, run.display_name, run.run_group, run.job_type) == (
        "project", "experiment", "experiment", "rl",
    )  # fmt: skip
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert sorted(steps) == [0, 2]
    assert steps[2]["actor/lr"] == 0.5
    assert math.isnan(steps[2]["val-core/a/acc/mean@1"])
    assert ends == [0]
    assert wandb_table(first, steps[0]) == rows(0)
    assert wandb_table(first, steps[2]) == [*rows(0), *rows(2)]
    # The other phase is a separate run.
    (sft,) = (tmp_path / "sft" / "wandb").glob("offline-run-*")
    other, steps, _ = wandb_run(sft)
    assert (other.display_name, other.run_group, other.job_type, list(steps)) == (
        "experiment-sft", "experiment", "sft", [1],
    )  # fmt: skip
    # A resumed run has the same id and continues after the checkpoint.
    log_steps(tee_of("wandb", tmp_path, resume=1), 2, 3)
    wandb.teardown()
    (second,) = set((tmp_path / "wandb").glob("offline-run-*")) - {first}
    again, steps, _ = wandb_run(second)
    assert again.run_id == run.run_id == run_id(tmp_path, "wandb") != other.run_id
    assert sorted(steps) == [2, 3]


def test_wandb_online_resumes_after_the_last_step_of_the_server(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        tee = tee_of("wandb", tmp_path)
        for step in range(1, 5):
            tee.log(step, {"x": step})
        tee.close()
        assert {step: values["x"] for step, values in server.history.items()} == {
            step: step for step in (1, 2, 3, 4)
        }
        # Killed after step 4, with a checkpoint of step 2; step 4 was not sent.
        del server.history[4]
        wandb.teardown()
        tee = tee_of("wandb", tmp_path, resume=2)
        for step in range(3, 6):
            tee.log(step, {"x": 10 * step})
        tee.close()
        assert tee.failures == {}
        assert {step: values["x"] for step, values in server.history.items()} == {
            1: 1, 2: 2, 3: 3, 4: 40, 5: 50,
        }  # fmt: skip


def test_wandb_without_credentials_raises_and_never_prompts(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("a prompt")

    # Pretend to be on a terminal.
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("getpass.getpass", ask)
    with pytest.raises(ConfigError, match=r"no API key .*`wandb login` .*WANDB_MODE=offline"):
        check_loggers(["console", "wandb"], tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    wandb.teardown()
    with pytest.raises(ConfigError, match=r"malformed: .*API key"):
        check_loggers(["wandb"], tmp_path)
    for name, value in (("WANDB_API_KEY", "0" * 40), ("WANDB_MODE", "disabled")):
        monkeypatch.setenv(name, value)
        wandb.teardown()
        check_loggers(["wandb"], tmp_path)
    assert list(tmp_path.glob("wandb")) == []


def test_wandb_disabled_logs_nothing(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log_steps(tee_of("wandb", tmp_path), 1)
    assert [path.name for path in (tmp_path / "wandb").iterdir()] == [RUN_FILE]


def test_wandb_does_not_take_over_another_open_run(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    theirs = wandb.init(project="theirs", dir=tmp_path, settings=wandb.Settings(silent=True))
    log_steps(tee_of("wandb", tmp_path), 1)
    assert wandb.run is theirs
    theirs.log({"x": 1})
    theirs.finish()
    assert run_id(tmp_path, "wandb") != theirs.id


def test_an_unreachable_wandb_server_does_not_stop_the_run(
    tmp_path: Path,
    wandb: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", UNREACHABLE)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    tee = tee_of("wandb", tmp_path)
    tee.log(1, {"actor/lr": 1.0})
    tee.close()
    assert list(tee.failures) == ["wandb"]
    (warning,) = [m for m in caplog.messages if m.startswith("wandb failed")]
    assert "connection refused" in warning
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1


# MLflow


def test_mlflow_database_has_the_logged_values(tmp_path: Path) -> None:
    folder = tmp_path / "a run's folder, 100 %"
    log_steps(tee_of("mlflow", folder, phase="sft"), 1)
    log_steps(tee_of("mlflow", folder), 0, 2)
    client = mlflow_client(folder / "mlflow")
    experiment = client.get_experiment_by_name("project")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(found) == ["experiment", "experiment-sft"]
    run, other = found["experiment"], found["experiment-sft"]
    assert (run.info.run_id, run.info.status) == (run_id(folder, "mlflow"), "FINISHED")
    assert (run.data.tags["phase"], other.data.tags["phase"]) == ("rl", "sft")
    assert run.data.params == {
        "trainer.seed": "1",
        "trainer.logger": '["wandb"]',
        "data.path": "null",
        "data.kwargs": "{}",
    }
    assert mlflow_history(client, run.info.run_id, "actor/lr") == [(0, 0.0), (2, 0.5)]
    assert math.isnan(run.data.metrics["val-core/a/acc/mean_at_1"])
    artifacts = folder / "mlflow" / "artifacts" / run.info.run_id / "artifacts"
    assert "seed: 1" in (artifacts / "config.yaml").read_text(encoding="utf-8")
    # A resumed run has the same id, and existing steps are not logged again.
    log_steps(tee_of("mlflow", folder, resume=1), 2, 3)
    assert run_id(folder, "mlflow") == run.info.run_id
    assert mlflow_history(client, run.info.run_id, "actor/lr") == [(0, 0.0), (2, 0.5), (3, 0.75)]
    table = json.loads((artifacts / "val" / "generations.json").read_text(encoding="utf-8"))
    assert table["columns"] == ["step", "prompt", "response", "score"]
    assert table["data"] == [list(row.values()) for step in (0, 2, 3) for row in rows(step)]
    # Its final status is that of the run.
    tee = tee_of("mlflow", folder, resume=3)
    with pytest.raises(OSError, match="the run's"), closing(tee):
        raise OSError("the run's")
    assert (client.get_run(run.info.run_id).info.status, tee.failures) == ("FAILED", {})


def test_an_unreachable_mlflow_server_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    check_loggers(["mlflow"], tmp_path)
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    connection, address = server.accept()
                    connections.append(address)
                    connection.close()

        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        before = dict(os.environ)
        thread = threading.Thread(target=hang_up)
        thread.start()
        tee = tee_of("mlflow", tmp_path)
        tee.log(1, {"actor/lr": 1.0})
        tee.close()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(connections) == 2, "one request and one retry"
    assert list(tee.failures) == ["mlflow"]
    (warning,) = [m for m in caplog.messages if m.startswith("mlflow failed")]
    assert "MlflowException: API request to http://127.0.0.1" in warning
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1
    # The short timeouts apply to the first requests only.
    assert dict(os.environ) == before


def test_recall_ignores_runs_of_another_server(tmp_path: Path) -> None:
    context = LoggerContext(run_dir=tmp_path, project_name="p", experiment_name="e", resume_step=4)
    run = TrackedRun.recall(context, "mlflow", where="there")
    assert (run.id, run.step) == (None, -1)
    run.id, run.step = "abc", 7
    run.save()
    assert TrackedRun.recall(context, "mlflow", where="there") == run
    assert TrackedRun.recall(context, "mlflow", where="elsewhere").id is None
    new = LoggerContext(run_dir=tmp_path, project_name="p", experiment_name="e")
    assert TrackedRun.recall(new, "mlflow", where="there").id is None
    run.path.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json cannot be read.*remove it to log to a new"):
        TrackedRun.recall(context, "mlflow", where="there")


def test_mlflow_keys_have_only_allowed_characters() -> None:
    assert tracker_mlflow.key("val-core/openai/gsm8k/acc/mean@8") == (
        "val-core/openai/gsm8k/acc/mean_at_8"
    )
    assert tracker_mlflow.key("a[0]=b") == "a_0__b"
    assert dict(leaves(CONFIG)) == {
        "trainer.seed": 1, "trainer.logger": ["wandb"], "data.path": None, "data.kwargs": {},
    }  # fmt: skip


# Trackio


def test_trackio_has_the_logged_values(
    tmp_path: Path, trackio: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    log_steps(tee_of("trackio", tmp_path, phase="sft"), 1)
    log_steps(tee_of("trackio", tmp_path), 0, 2)
    runs = {run.id: run for run in trackio.Api().runs("project")}
    run, other = runs[run_id(tmp_path, "trackio")], runs[run_id(tmp_path / "sft", "trackio")]
    assert (run.name, other.name) == ("experiment", "experiment-sft")
    assert {key: run.config[key] for key in CONFIG} == CONFIG
    assert run.config["_Group"] == "experiment"
    # A resumed run has the same id, and existing steps are not logged again.
    log_steps(tee_of("trackio", tmp_path, resume=1), 2, 3)
    assert run_id(tmp_path, "trackio") == run.id
    logged = trackio_rows(trackio, run.id)
    values = [(step, metrics) for step, metrics in logged if "actor/lr" in metrics]
    assert [(step, metrics["actor/lr"]) for step, metrics in values] == [
        (0, 0.0), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    tables = [(s, m["val/generations"]) for s, m in logged if "val/generations" in m]
    assert tables == [
        (step, {"_type": "trackio.table", "_value": rows(step)}) for step in (0, 2, 3)
    ]
    # A run with the same name in another folder is a separate run, also after a resume.
    elsewhere = tmp_path / "elsewhere"
    log_steps(tee_of("trackio", elsewhere), 5)
    log_steps(tee_of("trackio", tmp_path, resume=3), 4)
    assert run_id(elsewhere, "trackio") != run_id(tmp_path, "trackio")
    assert [step for step, _ in trackio_rows(trackio, run_id(elsewhere, "trackio"))] == [
        5,
        5,
    ]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_trackio_refuses_a_second_folder_in_a_process(
    tmp_path: Path, trackio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACKIO_DIR")
    with pytest.raises(ConfigError, match=r"run in a new process, or with TRACKIO_DIR set"):
        check_loggers(["trackio"], tmp_path)
    assert "TRACKIO_DIR" not in os.environ


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "TRACKIO_SPACE_ID",
            "somebody/metrics",
            "TRACKIO_SPACE_ID=somebody/metrics, .*run `hf auth login`",
        ),
        (
            "TRACKIO_SERVER_URL",
            UNREACHABLE,
            "without the server's write token: set TRACKIO_WRITE_TOKEN",
        ),
    ],
)
def test_trackio_space_or_server_without_credentials_is_refused(
    tmp_path: Path,
    trackio: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        check_loggers(["trackio"], tmp_path)


# Common behavior


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("trackio", "trackio"),
        ("tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as caught:
        check_loggers([extra], tmp_path)
    assert f"trainer.logger names {extra}, but the package is missing" in str(caught.value)
    assert f"pip install 'slipstream-rl[{extra}]'" in str(caught.value)


class MemoryTracker:
    """A tracker in memory. Logging the step `fail_at` raises."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.tables: list[int] = []
        self.ends: list[bool] = []
        self._fail_at = fail_at

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._fail_at:
            raise ConnectionError("gone")
        self.steps.append(step)

    def log_table(self, step: int, name: str, rows: Sequence[MetricsRow]) -> None:
        self.tables.append(step)

    def finish(self, *, failed: bool) -> None:
        self.ends.append(failed)


def background_logger(
    folder: Path, tracker: Tracker, *, resume: int | None = None, last_step: int = -1, **more: Any
) -> BackgroundLogger:
    messages: list[str] = more.pop("messages", [])
    context = LoggerContext(
        run_dir=folder,
        project_name="p",
        experiment_name="e",
        resume_step=resume,
        notify=messages.append,
    )

    def start(context: LoggerContext) -> tuple[Tracker, TrackedRun]:
        return tracker, TrackedRun(folder / "notes" / RUN_FILE, "", id="7", step=last_step)

    return BackgroundLogger("notes", context, start, **more)


def test_a_failing_tracker_is_reported_once_and_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = MemoryTracker(fail_at=2)
    logger = background_logger(tmp_path, notes)
    tee = TeeLogger([logger])
    for step in (1, 2):
        tee.log(step, {})
    logger._thread.join()
    tee.log(3, {})
    tee.log_table(4, "t", rows(4))
    tee.close()
    assert caplog.messages == ["notes failed and receives no more metrics: ConnectionError: gone"]
    assert (notes.steps, notes.tables, notes.ends, tee.loggers) == ([1], [], [True], [])


def test_a_hanging_tracker_does_not_block_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    class Hanging(MemoryTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            free.wait()

    logger = background_logger(tmp_path, Hanging(), close_seconds=0.05)
    tee = TeeLogger([logger])
    for step in range(50):
        tee.log(step, {"x": 1.0})
    tee.close()
    (warning,) = caplog.messages
    assert "TimeoutError: not everything was sent within 0.05 s" in warning
    free.set()
    logger._thread.join()


def test_a_tracker_that_fails_to_start_is_reported(tmp_path: Path) -> None:
    context = LoggerContext(run_dir=tmp_path, project_name="p", experiment_name="e")

    def start(context: LoggerContext) -> tuple[Tracker, TrackedRun]:
        raise SystemExit(3)  # some libraries do that; it must not end the run

    tee = TeeLogger([BackgroundLogger("notes", context, start)])
    tee.close()
    assert tee.failures == {"notes": "RuntimeError: SystemExit(3)"}


def test_a_resumed_run_sends_missing_steps_only(tmp_path: Path) -> None:
    tee = build_loggers(["file"], tmp_path, "p", "e")
    for step in range(1, 5):
        tee.log(step, {"x": step})
    tee.close()
    # Killed before the tracker had steps 3 and 4, which the checkpoint of step 4 includes.
    notes = MemoryTracker()
    with closing(background_logger(tmp_path, notes, resume=4, last_step=2)) as logger:
        logger.log(5, {})
    assert notes.steps == [3, 4, 5]
    # Killed after the tracker already had steps 5 to 7.
    notes, messages = MemoryTracker(), list[str]()
    with closing(
        background_logger(tmp_path, notes, resume=4, last_step=7, messages=messages)
    ) as logger:
        for step in (5, 6, 7, 8):
            logger.log_table(step, "t", rows(step))
            logger.log(step, {})
    assert (notes.steps, notes.tables) == ([8], [8])
    assert messages == ["notes: steps 5 to 7 are already in its run and are not sent again"]
    assert json.loads((tmp_path / "notes" / RUN_FILE).read_text()) == {
        "id": "7", "step": 8, "where": "",
    }  # fmt: skip


def test_tables_are_passed_to_table_loggers_only(tmp_path: Path) -> None:
    notes = MemoryTracker()
    tee = build_loggers(["file", "console"], tmp_path, "p", "e")
    tee.loggers.append(background_logger(tmp_path, notes))
    assert [isinstance(logger, TableLogger) for logger in tee.loggers] == [False, False, True]
    tee.log_table(1, "t", rows(1))
    tee.close()
    assert (notes.tables, tee.failures) == ([1], {})


def test_a_logger_that_cannot_be_created_is_omitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    tee = build_loggers(["tensorboard", "file"], tmp_path, "p", "e")
    tee.log(1, {})
    tee.close()
    assert list(tee.failures) == ["tensorboard"]
    assert len(caplog.messages) == 1
    assert (tmp_path / "metrics.jsonl").exists()


def test_created_loggers_are_closed_if_another_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = MemoryTracker()
    monkeypatch.setitem(LOGGERS, "notes", lambda context: background_logger(tmp_path, notes))
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(CheckpointError, match="remove the line"):
        build_loggers(["notes", "file"], tmp_path, "p", "e", resume_step=1)
    assert notes.ends == [True]


def test_importing_loggers_imports_no_tracker_library() -> None:
    program = (
        "import sys, slipstream.metrics.loggers\n"
        "print({'wandb', 'mlflow', 'trackio', 'pandas', 'sqlalchemy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


PROGRAM = """
import sys
from pathlib import Path
from slipstream.metrics.loggers import build_loggers

tee = build_loggers(["wandb", "trackio"], Path(sys.argv[1]), "a project", "experiment")
for step in (1, 2):
    tee.log_table(step, "t", [{"x": 1.0}])
    tee.log(step, {"x": 1.0})
tee.close()
assert tee.failures == {}, tee.failures
"""


def test_a_process_prints_its_locations_and_leaves_no_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MARK_OF_THIS_TEST", str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"trackio: TRACKIO_DIR={folder}/trackio trackio show --project 'a project'",
        "wandb: offline; to send the run later: wandb sync "
        f"{folder}/wandb/offline-run-*-{run_id(folder, 'wandb')}",
    ]
    left = [
        process.info["name"]
        for process in psutil.process_iter(["name", "environ"])
        if (process.info["environ"] or {}).get("MARK_OF_THIS_TEST") == str(folder)
    ]
    assert left == []
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["trackio", "wandb"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANDB_MODE", "odd"),
        ("WANDB_MODE", ""),
        ("WANDB_BASE_URL", "http://["),
        ("WANDB_SILENT", "maybe"),
        ("WANDB_FINISH_TIMEOUT", "soon"),
        ("WANDB_CONSOLE", "x" * 5000),
        ("WANDB_TAGS", "x" * 500),
        ("WANDB_RESUME", "5"),
    ],
)
def test_odd_variables_of_wandb_are_refused_by_name(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv(variable, value)
    wandb.teardown()
    with pytest.raises(ConfigError, match=rf"trainer\.logger=wandb: .*{variable}") as refused:
        check_loggers(["wandb"], tmp_path)
    assert len(str(refused.value)) < 500
    assert "environment variable" in str(refused.value)


def test_secrets_are_not_shown() -> None:
    detail = {"loc": ("api_key",), "input": "secret" * 9, "msg": "no key"}
    assert tracker_wandb._problem(detail) == "WANDB_API_KEY: no key"


@pytest.mark.parametrize(
    ("name", "project"),
    [
        ("wandb", "a/b"),
        ("wandb", "x" * 129),
        ("mlflow", ""),
        ("mlflow", "x" * 501),
        ("trackio", "x" * 5000),
    ],
)
def test_projects_that_a_tracker_cannot_have_are_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, project: str
) -> None:
    # These checks import the trackers for the run folder, which they cannot change later.
    monkeypatch.setattr(loggers, "_CHECKS", {})
    with pytest.raises(ConfigError, match=r"trainer\.project_name=.* set another"):
        check_loggers([name], tmp_path, project)
    check_loggers([name], tmp_path, "slipstream")


def test_whatever_a_check_raises_names_the_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise KeyError("HOME")

    monkeypatch.setitem(loggers._CHECKS, "wandb", broken)
    with pytest.raises(ConfigError, match=r"trainer\.logger=wandb: key 'HOME' is missing; "):
        check_loggers(["wandb"], tmp_path)


@pytest.mark.parametrize(
    "change", [{"id": 5}, {"step": "3"}, {"step": -2}, {"step": None}, {"id": []}]
)
def test_odd_values_in_the_recorded_run_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    context = LoggerContext(run_dir=tmp_path, project_name="p", experiment_name="e", resume_step=2)
    TrackedRun(path=tmp_path / "mlflow" / RUN_FILE, where="there", id="a", step=2).save()
    path = tmp_path / "mlflow" / RUN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"run\.json .*remove it"):
        TrackedRun.recall(context, "mlflow", where="there")
