"""verl's module `verl.utils.hdfs_io`, for local paths. Paths on HDFS raise DataError."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from slipstream.compat.verl.utils.fs import local_path

__all__ = ["copy", "exists", "makedirs"]


def exists(path: str | Path, **options: Any) -> bool:
    """Return whether the path exists."""
    return Path(local_path(path)).exists()


def makedirs(name: str | Path, mode: int = 0o777, exist_ok: bool = True, **options: Any) -> None:
    """Create a folder and its parents. Raises FileExistsError if it exists and not `exist_ok`."""
    os.makedirs(local_path(name), mode=mode, exist_ok=exist_ok)


def copy(src: str | Path, dst: str | Path, **kwargs: Any) -> bool:
    """Copy a file, or a folder with its contents, and return True. Raises OSError if it fails."""
    source, target = Path(local_path(src)), Path(local_path(dst))
    if source.is_dir():
        shutil.copytree(source, target, **kwargs)
    else:
        shutil.copy(source, target, **kwargs)
    return True
