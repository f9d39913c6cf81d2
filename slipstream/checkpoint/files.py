"""Crash-safe file writes: after a crash a file has either its old or its new content.

Knows nothing of steps or models. Called by the rest of `slipstream.checkpoint`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.reading import reading, reason, shown_path

_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that it survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Call `fsync_path` on `root` and every file and folder below it, leaves first."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) atomically. The text is on disk when this returns."""
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
    """Write `value` as indented, strict JSON (no NaN or infinity), atomically.

    Raises CheckpointError if JSON cannot represent the value.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be written as JSON: {error}; use only strings, finite numbers, "
            "booleans, null, lists and objects with string keys"
        ) from error
    write_text_atomic(path, text + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError if it is missing or invalid."""
    with reading(path, CheckpointError, "resume from another checkpoint"):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist: the checkpoint is incomplete or was written by another "
                "program; resume from another checkpoint"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{path} is corrupt, it is not JSON ({reason(error)}); resume from another "
                "checkpoint"
            ) from error
        if (place := _not_finite(value)) is not None:
            raise CheckpointError(
                f"{path} is corrupt: {shown_path(place)} is NaN or infinite; resume from another "
                "checkpoint"
            )
        return value


def _not_finite(value: Any) -> str | None:
    """Return the place of a number that is not finite, which Python reads but JSON does not have.

    Without recursion, because the value may be nested deeply.
    """
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        place, part = left.pop()
        if isinstance(part, float) and not math.isfinite(part):
            return place or "its value"
        if isinstance(part, list):
            left += [(f"{place}[{index}]", inner) for index, inner in enumerate(part)]
        elif isinstance(part, dict):
            dot = f"{place}." if place else ""
            left += [(f"{dot}{name}", inner) for name, inner in part.items()]
    return None


def files_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield every regular file below `root`, sorted, as (name relative to `root`, path)."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def crc32(path: Path) -> str:
    """Return the CRC-32 of the content as eight hex digits. It detects damage, not tampering."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error` or one of its causes means that the disk or the quota is full.

    safetensors passes on the operating system's error only as text, so that text is searched too.
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
    """Format a number of bytes with a binary unit: `1536` -> `1.5 KiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
