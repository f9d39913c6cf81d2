"""How the functions of this folder are compiled, and where the results are kept.

Compiling all of them takes a minute or two, so machine code is cached on disk. Numba looks only at
the file in which a function stands to see whether the cached code is of today; these functions are
built into one another across files, so the cache lies in a folder named after the contents of them
all.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from numba import cfunc, config, njit, types

from slipstream import tree_size
from slipstream.kernels.processor import has_matrix_unit

_one_at_a_time = RLock()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function over integers, at its first call. Products and sums may become fused
    multiply-adds; nothing is reordered."""
    return _compile(function, {"contract"})


def lanes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that sums: over as many lanes at a time as the processor has."""
    return _compile(function, {"reassoc", "contract", "nsz"})


def callback(function: Callable[..., None]) -> Any:
    """Compile a function over one address, now, as C would call it. Safe in any thread."""
    with _cached():
        signature = types.void(types.CPointer(types.int64))
        return cfunc(signature, cache=cache_folder() is not None)(function)


def _compile(function: Callable[..., Any], fastmath: set[str]) -> Callable[..., Any]:
    with _cached():
        kept = cache_folder() is not None
        options = {"cache": kept, "nogil": True, "error_model": "numpy", "fastmath": fastmath}
        compiled: Callable[..., Any] = njit(**options)(function)
    return compiled


@contextmanager
def _cached() -> Iterator[None]:
    # Numba asks for the folder when a function is decorated. It is one for all threads.
    with _one_at_a_time:
        before, config.CACHE_DIR = config.CACHE_DIR, cache_folder() or ""
        try:
            yield
        finally:
            config.CACHE_DIR = before


def kept_files() -> Iterator[Path]:
    """The compiled code that earlier processes have left."""
    folder = cache_folder()
    return iter(()) if folder is None else Path(folder).rglob("*.nbc")


def source_files() -> list[Path]:
    """Every file with code that is compiled."""
    here = Path(__file__).parent
    return [*sorted([*here.glob("*.py"), *here.glob("*/*.py")]), Path(tree_size.__file__)]


@cache
def cache_folder() -> str | None:
    """Where code is kept: NUMBA_CACHE_DIR, else beside this file, else in the home folder; None,
    with a warning, where none can be written."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    # Numba keeps code of different processors apart, but not what this process may use of one.
    name = f"numba-{digest.hexdigest()[:16]}{'-amx' if has_matrix_unit() else ''}"
    usual = (Path(__file__).parent / "__pycache__", Path.home() / ".cache" / "slipstream")
    for parent in (Path(config.CACHE_DIR),) if config.CACHE_DIR else usual:
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    warnings.warn(
        "compiled kernels cannot be kept, so that every start compiles them for a minute or two: "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        stacklevel=2,
    )
    return None
