"""verl's module `verl.utils.fs`: files and folders that are local already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import DataError

__all__ = ["copy_to_local", "is_non_local", "local_path"]


def is_non_local(path: str | Path) -> bool:
    """Return whether a path is on HDFS."""
    return str(path).startswith("hdfs://")


def local_path(path: str | Path) -> str:
    """Return the path as text. Raises DataError if it is on HDFS, which is not supported."""
    if is_non_local(path):
        raise DataError(
            f"{path} is on HDFS, which is not supported: copy it to a local disk and set that path"
        )
    return str(path)


def copy_to_local(src: str | Path, cache_dir: str | Path | None = None, **options: Any) -> str:
    """Return `src` unchanged, because it is a local path or the name of a model.

    `cache_dir` and verl's other options (`filelock`, `verbose`, `always_recopy`, `use_shm`) concern
    copies and are unused. Raises DataError for a path on HDFS.
    """
    return local_path(src)


copy_local_path_from_hdfs = copy_to_local
