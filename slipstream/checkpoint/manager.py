"""Checkpoints of one run on disk: written completely or not at all, the last k kept.

    root/global_step_N/...                     one complete checkpoint (with manifest.json)
    root/latest_checkpointed_iteration.txt     N of the one to resume from, written last
    root/.saving.global_step_N.*               being written
    root/.replaced.global_step_N.*             an older N, while a newer one takes its name
    root/.deleting.global_step_N.*             being removed

The layout is VERL's. Names that start with a dot are locked (flock) by the process that works on
them, so that a later one can tell leftovers of a dead process from work in progress. Does not know
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
from slipstream.checkpoint.state import check_format_version
from slipstream.errors import CheckpointError, ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
RESUME_MODES = ("auto", "disable", "resume_path")
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
_STEP = re.compile(r"global_step_(\d+)")
_WORK = re.compile(r"\.(saving|replaced|deleting)\.(global_step_\d+)\.[0-9a-f]+")


class CheckpointManager:
    """Saves, finds and prunes the checkpoints under `root`. One process saves at a time.

    `keep`: how many of the last saved checkpoints stay (None: all of them). The one that the
    tracker names always stays, and folders that this class did not write are never touched.
    """

    def __init__(self, root: Path, *, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(
                f"the number of checkpoints to keep is {keep}; use 1 or more, or null to keep all"
            )
        self.root = root
        self._keep = keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write(folder)` fill a folder, and make it `global_step_{step}` in one rename.

        Whenever the process dies, `latest()` is either this complete checkpoint or the complete
        one before. A step that exists already is replaced. Returns the final folder. Raises
        CheckpointError where the disk is full or refuses the write (nothing half-written stays, the
        checkpoint before stays); whatever else `write` raises passes through.
        """
        if step < 0:
            raise CheckpointError(f"cannot save step {step}: steps count from 0")
        final = self.folder(step)
        if final.exists() and not (final / MANIFEST).is_file():
            raise CheckpointError(
                f"{final} exists and is not a checkpoint of ours, so it is not replaced; move "
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
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
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
        """The checkpoint that the tracker names; None where nothing was ever saved.

        Without a tracker (the first save ended between its last two steps) it is the one saved
        last. Raises CheckpointError where the tracker is corrupt or names a missing checkpoint.
        """
        steps = self.steps()
        tracker = self.root / TRACKER
        try:
            text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return max((self.folder(s) for s in steps), key=_serial, default=None)
        existing = ", ".join(map(str, steps)) or "none"
        if not re.fullmatch(r"\d+", text):
            raise CheckpointError(
                f"{tracker} holds {text!r}, not a step; write one of the steps that exist into it "
                f"({existing}), or set trainer.resume_mode=disable to start anew"
            )
        step = int(text)
        if step not in steps:
            raise CheckpointError(
                f"{tracker} names step {step}, but {self.folder(step)} is not a complete "
                f"checkpoint; steps that exist: {existing}. Write one of them into the tracker, or "
                "set trainer.resume_mode=disable to start anew"
            )
        return self.folder(step)

    def resolve(self, resume_mode: str, resume_from_path: Path | str | None) -> Path | None:
        """The verified checkpoint to start from, or None to start anew.

        `auto`: `latest()`; `disable`: none; `resume_path`: the folder `resume_from_path`, of this
        or another run. Raises ConfigError for another mode or a missing path, CheckpointError for
        a path that is no checkpoint, and what `verify` raises.
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
        """List the files with sizes and checksums, and bring everything to disk."""
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
        # A folder cannot be renamed over a full one. Between the two renames `_recover` of any
        # process that looks waits for our lock, or undoes the first one where we are dead.
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
        # The tracker names the one saved last, whose serial is the highest: it is not among these.
        by_age = sorted((self.folder(s) for s in self.steps()), key=_serial)
        for folder in by_age[: -self._keep]:
            with _work_folder(self.root, "deleting", folder.name, take=folder):
                fsync_path(self.root)

    def _recover(self) -> None:
        """Give a checkpoint its name back whose replacement never arrived."""
        for path, _, name in _work_folders(self.root, kinds={"replaced"}):
            with _locked(path, wait=True) as locked:
                if locked and path.exists() and not (self.root / name).exists():
                    path.rename(self.root / name)
                    fsync_path(self.root)

    def _sweep(self) -> None:
        """Remove what dead processes left."""
        self._recover()
        for path, _, _ in _work_folders(self.root, kinds={"saving", "deleting", "replaced"}):
            with _locked(path, wait=False) as locked:
                if locked:
                    shutil.rmtree(path, ignore_errors=True)

    def _explain(self, error: Exception, step: int, written: int) -> None:
        """Raise what a user needs to know where `error` is the disk's; else return."""
        full = is_disk_full(error)
        if not full and not isinstance(error, OSError):
            return
        target = self.folder(step)
        before = "there is no earlier checkpoint"
        try:
            if self.steps() and (latest := self.latest()):
                before = f"{latest} stays the latest checkpoint"
                written = max(written, _size(latest))
        except CheckpointError as tracker_error:
            before = str(tracker_error)
        if full:
            free = shutil.disk_usage(self.root).free
            raise CheckpointError(
                f"disk full while saving {target}: {human_bytes(free)} free, at least "
                f"{human_bytes(written)} needed; {before}. Free some space or set a smaller "
                "trainer.max_actor_ckpt_to_keep, then resume"
            ) from error
        raise CheckpointError(
            f"cannot save {target}: {error}; {before}. Check that {self.root} is writable"
        ) from error


def verify(path: Path) -> None:
    """Compare every file of the checkpoint `path` with its manifest.

    Files that were added later are ignored. Raises CheckpointError naming each file that is
    missing, of the wrong size, or changed.
    """
    manifest = _read_manifest(path)
    problems = []
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
        raise CheckpointError(f"{file} is corrupt: it holds {type(manifest).__name__}")
    check_format_version(file, manifest.get("format_version"), MANIFEST_VERSION)
    files = manifest.get("files")
    sound = isinstance(files, dict) and all(
        isinstance(entry, dict) and {"size", "crc32"} <= entry.keys() for entry in files.values()
    )
    if not sound or type(manifest.get("step")) is not int:
        raise CheckpointError(
            f"{file} is corrupt: files or step are missing; resume from another checkpoint"
        )
    return manifest


def _serial(folder: Path) -> int:
    """Order of saving: a rolled-back run saves lower steps later.

    A manifest that cannot be read sorts first: pruning must not stop at a damaged checkpoint.
    """
    try:
        return int(_read_manifest(folder).get("serial", 0))
    except CheckpointError:
        return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for _, path in files_below(folder))


def _work_folders(root: Path, *, kinds: set[str]) -> Iterator[tuple[Path, str, str]]:
    """`(path, kind, name of the checkpoint)` of the dotted folders of `kinds`."""
    for path in sorted(root.iterdir()):
        match = _WORK.fullmatch(path.name)
        if match and match[1] in kinds:
            yield path, match[1], match[2]


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of folder `path`; yields False where another holds it or it is gone.

    The lock goes with the process that holds it, however that ends.
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
                f"the file system of {path.parent} has no file locks ({error}); set "
                "trainer.default_local_dir to one that has, or mount it with them"
            ) from error
        yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _work_folder(root: Path, kind: str, name: str, *, take: Path | None = None) -> Iterator[Path]:
    """A locked dotted folder, new or made of `take` by renaming; removed at the end if still there.

    The lock is on the folder itself, so it is held before `take` loses its name.
    """
    path = root / f".{kind}.{name}.{secrets.token_hex(8)}"
    source = take or path
    if take is None:
        path.mkdir()
    with _locked(source, wait=True):
        if take is not None:
            take.rename(path)
        elif not path.exists():
            # Another process took the new folder for a leftover before it was locked.
            raise CheckpointError(
                f"{path} vanished: another process is saving into {root}; give each run its own "
                "trainer.default_local_dir"
            )
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
