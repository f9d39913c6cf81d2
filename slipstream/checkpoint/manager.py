"""Save, find, verify and prune the checkpoints of one run.

    root/global_step_N/...                     a complete checkpoint (with manifest.json)
    root/latest_checkpointed_iteration.txt     the step N to resume from, written last
    root/.saving.global_step_N.*               a checkpoint that is being written
    root/.replaced.global_step_N.*             an old checkpoint N while a new one replaces it
    root/.deleting.global_step_N.*             a checkpoint that is being removed

The layout is the one of verl. A process locks (flock) each dotted folder that it works on. So a
later process can tell folders left by a dead process from folders in use. This module does not know
what a checkpoint contains: `save` takes a function that fills a folder. Called by the loops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import (
    crc32,
    files_below,
    fsync_path,
    fsync_tree,
    human_bytes,
    is_disk_full,
    read_json,
    write_json,
    write_text_atomic,
)
from slipstream.checkpoint.state import check_format_version, state_files
from slipstream.errors import CheckpointError, ConfigError
from slipstream.reading import reading, shown, value_problem

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
RESUME_MODES = ("auto", "disable", "resume_path")
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
_STEP = re.compile(r"global_step_([0-9]{1,18})")
_WORK = re.compile(r"\.(saving|replaced|deleting)\.(global_step_\d+)\.[0-9a-f]+")


class CheckpointManager:
    """Saves, finds and prunes the checkpoints under `root`. One process may save at a time.

    `keep` is the number of most recently saved checkpoints to keep (None: all). The checkpoint
    named by the tracker file is always kept. Folders not written by this class are never changed.
    """

    def __init__(self, root: Path, *, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(
                f"the number of checkpoints to keep is {keep}; use 1 or more, or null to keep all"
            )
        self.root = root
        self._keep = keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write(folder)` fill a folder, then rename it to `global_step_{step}` atomically.

        If the process dies at any point, `latest()` is either the new complete checkpoint or the
        previous one. An existing checkpoint of the same step is replaced. Returns the final
        folder. Raises CheckpointError if the disk is full or not writable; then no partial
        checkpoint remains, and the previous one is unchanged. Other errors of `write` propagate.
        """
        if step < 0:
            raise CheckpointError(f"cannot save step {step}: step numbers start at 0")
        final = self.folder(step)
        if final.exists() and not (final / MANIFEST).is_file():
            raise CheckpointError(
                f"{final} exists and is not a Slipstream checkpoint, so it is not replaced; move "
                "it away or set another trainer.default_local_dir"
            )
        written = 0
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with _work_folder(self.root, "saving", final.name) as temporary:
                try:
                    write(temporary)
                    self._seal(step, temporary)
                    self._publish(temporary, final)
                except BaseException:
                    written = _size(temporary)
                    raise
            write_text_atomic(self.root / TRACKER, str(step))
            self._prune()
        except Exception as error:
            self._explain(error, step, written)
            raise
        return final

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether or not it exists."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        self._recover()
        found = (_STEP.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(
            int(match[1])
            for match in found
            if match and (self.root / match[0] / MANIFEST).is_file()
        )

    def latest(self) -> Path | None:
        """Return the checkpoint that the tracker file names; None if nothing was ever saved.

        The tracker file is missing if the very first save died before writing it. Then the most
        recently saved checkpoint is returned. Raises CheckpointError if the tracker file is
        corrupt or names a missing checkpoint.
        """
        steps = self.steps()
        tracker = self.root / TRACKER
        existing = ", ".join(map(str, steps)) or "none"
        remedy = f"write an existing step into it ({existing})"
        with reading(tracker, CheckpointError, remedy):
            try:
                text = tracker.read_text(encoding="utf-8", errors="replace").strip()
            except FileNotFoundError:
                return max((self.folder(s) for s in steps), key=_serial, default=None)
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise CheckpointError(
                f"{tracker} contains {shown(text)}, not a step; write an existing step into it "
                f"({existing}), or set trainer.resume_mode=disable to start from scratch"
            )
        step = int(text)
        if step not in steps:
            raise CheckpointError(
                f"{tracker} names step {step}, but {self.folder(step)} is not a complete "
                f"checkpoint; existing steps: {existing}. Write one of them into the tracker, or "
                "set trainer.resume_mode=disable to start from scratch"
            )
        return self.folder(step)

    def resolve(self, resume_mode: str, resume_from_path: Path | str | None) -> Path | None:
        """Return the verified checkpoint to start from, or None to start from scratch.

        `resume_mode` `auto` is `latest()`, `disable` is None, and `resume_path` is the folder
        `resume_from_path`, of this or another run. Raises ConfigError for an unknown mode or a
        missing path, CheckpointError if the path is not a checkpoint, and what `verify` raises.
        """
        if resume_mode not in RESUME_MODES:
            raise ConfigError(
                f"trainer.resume_mode is {resume_mode!r}; use one of {', '.join(RESUME_MODES)}"
            )
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            path = self.latest()
        elif not resume_from_path:
            raise ConfigError(
                "trainer.resume_mode=resume_path needs trainer.resume_from_path: the "
                "global_step_N folder to resume from"
            )
        else:
            path = Path(resume_from_path)
            if not path.is_dir() or not _STEP.fullmatch(path.resolve().name):
                steps = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(
                    f"trainer.resume_from_path is {str(path)!r}, which is not a global_step_N "
                    f"folder; steps under {self.root}: {steps}"
                )
        if path is not None:
            verify(path)
        return path

    def _seal(self, step: int, folder: Path) -> None:
        """Write the manifest (sizes and CRC-32 of all files) and flush everything to disk."""
        serial = 1 + max((_serial(self.folder(s)) for s in self.steps()), default=0)
        files = {
            name: {"size": path.stat().st_size, "crc32": crc32(path)}
            for name, path in files_below(folder)
        }
        manifest = {
            "format_version": MANIFEST_VERSION,
            "step": step,
            "serial": serial,
            "files": files,
        }
        write_json(folder / MANIFEST, manifest)
        fsync_tree(folder)

    def _publish(self, temporary: Path, final: Path) -> None:
        if not final.exists():
            temporary.rename(final)
            fsync_path(self.root)
            return
        # A rename cannot replace a folder that has content, so two renames are needed. In between,
        # `_recover` of another process waits for our lock, or undoes the first one if we died.
        with _work_folder(self.root, "replaced", final.name, take=final) as old:
            try:
                temporary.rename(final)
            except OSError:
                old.rename(final)
                raise
            fsync_path(self.root)

    def _prune(self) -> None:
        if self._keep is None:
            return
        # The tracker names the most recent save, which has the highest serial: it is never pruned.
        by_age = sorted((self.folder(s) for s in self.steps()), key=_serial)
        for folder in by_age[: -self._keep]:
            with _work_folder(self.root, "deleting", folder.name, take=folder):
                fsync_path(self.root)

    def _recover(self) -> None:
        """Restore each replaced checkpoint whose replacement was never completed."""
        for path, _, name in _work_folders(self.root, kinds={"replaced"}):
            with _locked(path, wait=True) as locked:
                if locked and path.exists() and not (self.root / name).exists():
                    path.rename(self.root / name)
                    fsync_path(self.root)

    def _sweep(self) -> None:
        """Remove the temporary folders that dead processes left."""
        self._recover()
        for path, _, _ in _work_folders(self.root, kinds={"saving", "deleting", "replaced"}):
            with _locked(path, wait=False) as locked:
                if locked:
                    shutil.rmtree(path, ignore_errors=True)

    def _explain(self, error: Exception, step: int, written: int) -> None:
        """Raise a CheckpointError with remedies if `error` came from the disk; else return."""
        full = is_disk_full(error)
        if not full and not isinstance(error, OSError):
            return
        target = self.folder(step)
        previous = "there is no earlier checkpoint"
        try:
            if self.steps() and (latest := self.latest()):
                previous = f"{latest} stays the latest checkpoint"
                written = max(written, _size(latest))
        except CheckpointError as tracker_error:
            previous = str(tracker_error)
        if full:
            free = shutil.disk_usage(self.root).free
            raise CheckpointError(
                f"disk full while saving {target}: {human_bytes(free)} free, at least "
                f"{human_bytes(written)} needed; {previous}. Free some space or set a smaller "
                "trainer.max_actor_ckpt_to_keep, then resume"
            ) from error
        raise CheckpointError(
            f"cannot save {target}: {error}; {previous}. Check that {self.root} is writable"
        ) from error


def verify(path: Path) -> None:
    """Compare every file of the checkpoint `path` with its manifest.

    Files that were added later are ignored. Raises CheckpointError that names each file that is
    missing, has the wrong size, or has changed.
    """
    manifest = _read_manifest(path)
    named = _STEP.fullmatch(path.resolve().name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(
            f"{path / MANIFEST} is the manifest of step {manifest['step']}, not of the step in "
            f"the name of its folder, {named[1]}; give the folder its own name again, or "
            "resume from another checkpoint with trainer.resume_mode=resume_path and "
            "trainer.resume_from_path"
        )
    problems = []
    for file in state_files(path):
        name = file.relative_to(path).as_posix()
        if name not in manifest["files"]:
            problems.append(f"{name} is not in {MANIFEST}")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) != entry["size"]:
            problems.append(f"{name} has {size} bytes instead of {entry['size']}")
        elif (found := crc32(file)) != entry["crc32"]:
            problems.append(f"{name} has checksum {found} instead of {entry['crc32']}")
    if problems:
        raise CheckpointError(
            f"{path} is corrupt: {'; '.join(problems)}. Resume from another checkpoint with "
            "trainer.resume_mode=resume_path and trainer.resume_from_path"
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    manifest = read_json(file)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} is corrupt: it contains {type(manifest).__name__}")
    check_format_version(file, manifest.get("format_version"), MANIFEST_VERSION)
    files = manifest.get("files")
    if not isinstance(files, dict) or "step" not in manifest:
        raise CheckpointError(
            f"{file} is corrupt: files or step are missing; resume from another checkpoint"
        )
    for name, entry in files.items():
        if not _is_entry(name, entry):
            raise CheckpointError(
                f"{file} is corrupt: files has {shown(name)}: {shown(entry)}, which is not a file "
                "of this folder with its size and crc32; resume from another checkpoint"
            )
    for key in ("step", "serial"):
        value = manifest.get(key)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise CheckpointError(
                f"{file} is corrupt: {key}={shown(value)} must be a whole number; resume from "
                "another checkpoint"
            )
    return manifest


def _is_entry(name: str, entry: object) -> bool:
    parts = Path(name).parts
    inside = bool(parts) and not Path(name).is_absolute() and ".." not in parts and "\0" not in name
    return (
        inside
        and value_problem(name) is None
        and isinstance(entry, dict)
        and entry.keys() == {"size", "crc32"}
        and type(entry.get("size")) is int
        and entry["size"] >= 0
        and isinstance(entry.get("crc32"), str)
    )


def _serial(folder: Path) -> int:
    """Return the save counter. Steps are no substitute: a run rolled back re-saves lower steps.

    An unreadable manifest counts as 0, because pruning must not fail at a damaged checkpoint.
    """
    try:
        return int(_read_manifest(folder).get("serial", 0))
    except CheckpointError:
        return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for _, path in files_below(folder))


def _work_folders(root: Path, *, kinds: set[str]) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, kind, checkpoint name) of the dotted folders of the given `kinds`."""
    for path in sorted(root.iterdir()):
        match = _WORK.fullmatch(path.name)
        if match and match[1] in kinds:
            yield path, match[1], match[2]


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of the folder `path`.

    Yields False if another process holds the lock (unless `wait`) or the folder is missing. The
    operating system releases the lock when the process ends, however it ends.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise CheckpointError(
                f"the file system of {path.parent} does not support file locks ({error}); set "
                "trainer.default_local_dir to one that does, or mount it with locks enabled"
            ) from error
        yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _work_folder(root: Path, kind: str, name: str, *, take: Path | None = None) -> Iterator[Path]:
    """Yield a locked dotted folder, and remove it at the end if it still exists.

    The folder is new, or with `take` an existing folder that is renamed. The lock is on the folder
    itself, so it is already held when `take` is renamed.
    """
    path = root / f".{kind}.{name}.{secrets.token_hex(8)}"
    source = take or path
    if take is None:
        path.mkdir()
    with _locked(source, wait=True):
        if take is not None:
            take.rename(path)
        elif not path.exists():
            # Another process removed the new folder as a leftover before we locked it.
            raise CheckpointError(
                f"{path} vanished: another process is saving into {root}; give each run its own "
                "trainer.default_local_dir"
            )
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
