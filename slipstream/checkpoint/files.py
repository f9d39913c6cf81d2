"""Writes that survive a crash: a file is either the old one or the new one, never half of each.

Knows nothing of steps or models. Called by the rest of `slipstream.checkpoint`.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


def fsync_path(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """`fsync_path` on every file and folder below and including `root`, leaves first."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable, strict JSON (no NaN or infinity), atomically.

    Raises CheckpointError where JSON cannot hold the value.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be written as JSON: {error}; keep only strings, finite numbers, "
            "booleans, null, lists and string-keyed objects in it"
        ) from error
    write_text_atomic(path, text + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; CheckpointError names the file when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: the checkpoint is incomplete or of another program; "
            "resume from another one"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is corrupt, not JSON ({error}); resume from another checkpoint"
        ) from error


def files_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file below `root` with its name relative to it (with `/`), sorted."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def crc32(path: Path) -> str:
    """CRC-32 of the content as eight hex digits: finds damage, not tampering."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that disk or quota is used up.

    safetensors reports the operating system's error as text only.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if type(seen).__name__ == "SafetensorError" and "os error 28" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def human_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
