"""The run folder: locking it, checking that it belongs to this run, moving earlier runs away.

`run.train` calls it before it creates anything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.checkpoint.files import write_text_atomic
from slipstream.checkpoint.manager import TRACKER, CheckpointManager
from slipstream.checkpoint.state import RunState, state_file
from slipstream.config.load import CONFIG_FILE, diff, load_config, to_yaml
from slipstream.config.schema import Config
from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics.timeline import EVENTS_FILE
from slipstream.reading import reading
from slipstream.report.page import REPORT_FILE
from slipstream.report.read import LOCK_FILE

_ANOTHER = "set trainer.default_local_dir to a folder that can be written"
PICTURE = "run.png"
_STEP = re.compile(r"[0-9]{1,18}")
PREVIOUS = "previous"
_KEPT = (
    # In this order: without the tracker file, no run resumes from a checkpoint by accident.
    TRACKER,
    "global_step_*",
    "sft",
    "metrics*.jsonl",
    EVENTS_FILE,
    "rollouts",
    "validation",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    PICTURE,
    REPORT_FILE,
    CONFIG_FILE,
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run folder during the body. The lock ends with the process, however it ends.

    Raises CheckpointError if another process holds the lock.
    """
    with reading(folder, CheckpointError, _ANOTHER, noun="run folder "):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is using {folder}; wait for it, or set another "
                "trainer.default_local_dir"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the file system of {folder} has no file locks ({error}); set "
                "trainer.default_local_dir to a file system with locks, or mount it with locks"
            ) from error
        yield
    finally:
        os.close(descriptor)


def claim_folder(
    folder: Path, config: Config, notify: Callable[[str], None] = lambda text: None
) -> None:
    """Use `folder` for this run: it must be new, or hold a run with the same configuration.

    With `trainer.resume_mode=disable`, an earlier run is moved to `previous.N` in the folder.
    Raises CheckpointError, with the differences, if the folder holds checkpoints of a run with
    other settings.
    """
    if config.trainer.resume_mode == "disable":
        with reading(folder, CheckpointError, _ANOTHER, noun="run folder "):
            moved = set_aside(folder)
        if moved is not None:
            notify(f"starting over; the earlier run in {folder} is now in {moved}")
    else:
        check_same_run(folder, config)
    write_settings(folder, config)


def write_settings(folder: Path, config: Config) -> None:
    """Write the configuration of the run. Raises CheckpointError if that fails."""
    path = folder / CONFIG_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, to_yaml(config))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}); make room, or set another "
            "trainer.default_local_dir"
        ) from error


def check_same_run(folder: Path, config: Config) -> None:
    """Raise CheckpointError, with the differences, if `folder` holds checkpoints of a run with
    other settings."""
    path = folder / CONFIG_FILE
    if config.trainer.resume_mode == "disable" or not (path.exists() and has_checkpoint(folder)):
        return
    if differences := diff(_earlier(path), config):
        raise CheckpointError(
            f"{folder} holds a run with other settings:\n  "
            + "\n  ".join(differences)
            + "\nset another trainer.default_local_dir, undo the changes, or start over "
            "with trainer.resume_mode=disable"
        )


def recorded_template_date(folder: Path, config: Config) -> str | None:
    """The date of chat templates in the checkpoint that `config` resumes from; None if none."""
    trainer = config.trainer
    checkpoint = None
    if trainer.resume_mode == "auto":
        roots = (folder, folder / "sft")
        found = (CheckpointManager(root, keep=None).latest() for root in roots)
        checkpoint = next((path for path in found if path is not None), None)
    elif trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        checkpoint = Path(trainer.resume_from_path)
    if checkpoint is None or not state_file(checkpoint).is_file():
        return None  # a path that is no checkpoint is refused later, with a reason
    section = RunState.load(checkpoint).config.get("data")
    day = section.get("chat_template_date") if isinstance(section, dict) else None
    return day if isinstance(day, str) else None


def has_checkpoint(folder: Path) -> bool:
    """True if the run folder holds a complete checkpoint of SFT or RL."""
    return any(CheckpointManager(root, keep=None).steps() for root in (folder, folder / "sft"))


def _earlier(path: Path) -> Config:
    try:
        return load_config(file=path, complete=False, notify=lambda text: None)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} cannot be read, so the settings of the earlier run are unknown: {error}\nset "
            "another trainer.default_local_dir, or start over with trainer.resume_mode=disable"
        ) from error


def set_aside(folder: Path) -> Path | None:
    """Move the files of an earlier run to `folder/previous.N` and return that folder; None if there
    are no such files."""
    found = [path for pattern in _KEPT for path in sorted(folder.glob(pattern))]
    if not found:
        return None
    target = free_name(folder / PREVIOUS)
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target


def free_name(path: Path) -> Path:
    """The first of `path.1`, `path.2`, ... that does not exist."""
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return other


def forget_after(folder: Path, step: int | None, *, prefix: str = "") -> None:
    """Delete the records `{prefix}N.jsonl` of steps after `step`: a resumed run writes them again.

    With `step` None (a new run), move all records to `folder/previous.N`.
    """
    found = {
        path: int(path.stem.removeprefix(prefix))
        for path in folder.glob(f"{prefix}*.jsonl")
        if _STEP.fullmatch(path.stem.removeprefix(prefix))
    }
    if not found:
        return
    if step is None:
        target = free_name(folder / PREVIOUS)
        target.mkdir()
        for path in found:
            path.rename(target / path.name)
        return
    for path, number in found.items():
        if number > step:
            path.unlink()
