"""Compile the kernels with Numba and cache the machine code on disk.

Compiling all kernels takes a minute or two. Numba decides from the file that defines a function
whether the cached code is current. But kernels are inlined into each other across files. So the
name of the cache folder contains a hash of all kernel files.
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
from slipstream.kernels.processor import has_amx

_cache_dir_lock = RLock()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of integers at its first call.

    The compiler may fuse products and sums into multiply-adds, but it does not reorder operations.
    """
    return _compile(function, {"contract"})


def vector_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that computes a sum, in as many vector lanes as the CPU has.

    Unlike `kernel`, the compiler may reorder the terms.
    """
    return _compile(function, {"reassoc", "contract", "nsz"})


def callback(function: Callable[..., None]) -> Any:
    """Compile a function of one address immediately, as a C callback. Thread-safe."""
    with _cached():
        signature = types.void(types.CPointer(types.int64))
        return cfunc(signature, cache=cache_folder() is not None)(function)


def _compile(function: Callable[..., Any], fastmath: set[str]) -> Callable[..., Any]:
    with _cached():
        cached = cache_folder() is not None
        options = {"cache": cached, "nogil": True, "error_model": "numpy", "fastmath": fastmath}
        compiled: Callable[..., Any] = njit(**options)(function)
    return compiled


@contextmanager
def _cached() -> Iterator[None]:
    """Set Numba's cache folder to ours in the body."""
    # Numba reads the folder when a function is decorated. The setting is global to all threads.
    with _cache_dir_lock:
        before, config.CACHE_DIR = config.CACHE_DIR, cache_folder() or ""
        try:
            yield
        finally:
            config.CACHE_DIR = before


def cached_files() -> Iterator[Path]:
    """Yield the files with compiled code from this and earlier processes."""
    folder = cache_folder()
    return iter(()) if folder is None else Path(folder).rglob("*.nbc")


def source_files() -> list[Path]:
    """Every file with code that is compiled."""
    here = Path(__file__).parent
    return [*sorted([*here.glob("*.py"), *here.glob("*/*.py")]), Path(tree_size.__file__)]


@cache
def cache_folder() -> str | None:
    """Return the folder for compiled code, or None, with a warning, if no folder is writable.

    The first writable one is used: NUMBA_CACHE_DIR if it is set; else a folder next to this file,
    or one in the home folder.
    """
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    # Numba separates code of different CPUs, but does not know whether AMX is permitted.
    name = f"numba-{digest.hexdigest()[:16]}{'-amx' if has_amx() else ''}"
    defaults = (Path(__file__).parent / "__pycache__", Path.home() / ".cache" / "slipstream")
    for parent in (Path(config.CACHE_DIR),) if config.CACHE_DIR else defaults:
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    warnings.warn(
        "compiled kernels cannot be cached, so every start compiles them for a minute or two; set "
        "NUMBA_CACHE_DIR to a writable folder",
        stacklevel=2,
    )
    return None
