"""How programs of each language are compiled and started on this machine."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import RewardError, did_you_mean

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""System folders with programs and libraries. They contain no user data."""

PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Commands and files of a language. An uncompiled program is its own binary.

    `source` and `binary` are file names in the program's folder. `folders` must be readable in
    addition to the system folders.
    """

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    binary: str = ""
    folders: tuple[str, ...] = ()


def toolchain(language: str, python: str | None, *, for_all: bool) -> Toolchain:
    """Return the toolchain of a language.

    `python` is the Python interpreter; None is the system's, or the running one if the system has
    none. `for_all`: every user must be able to read it. Raises RewardError, naming the remedy, if
    a tool is missing.
    """
    if language == "python":
        executable, folders = _python(python, for_all)
        return Toolchain("main.py", (executable, "-I", "-B", "main.py"), folders=folders)
    if language not in _COMPILERS:
        known = ["python", *_COMPILERS]
        raise RewardError(
            f"programs in {language!r} cannot be run here{did_you_mean(language, known)} (known: "
            f"{', '.join(known)}); a Sandbox Fusion service may support it: set "
            "reward_model.sandbox_fusion.url"
        )
    compiler, source = _COMPILERS[language]
    if shutil.which(compiler, path=PATH) is None:
        raise RewardError(
            f"programs in {language} need {compiler}, which is not in {PATH}; on Debian and "
            "Ubuntu: apt install g++"
        )
    command = (compiler, "-O2", "-o", "program", source, "-lm")
    return Toolchain(source, ("./program",), command, "program")


def knows(language: str) -> bool:
    """Return whether a language is supported, provided that its tools are installed."""
    return language == "python" or language in _COMPILERS


_COMPILERS = {"c": ("gcc", "main.c"), "cpp": ("g++", "main.cpp")}


def _python(chosen: str | None, for_all: bool) -> tuple[str, tuple[str, ...]]:
    import sys

    candidates = [chosen] if chosen else ["/usr/bin/python3", "/usr/local/bin/python3"]
    if not chosen:
        candidates.append(os.path.realpath(sys.executable))
    for candidate in candidates:
        if (folders := _folders(candidate)) is None:
            continue
        if for_all and not all(_open_to_all(Path(f)) for f in (*folders, candidate)):
            continue
        outside = (f for f in folders if not f.startswith(tuple(f"{s}/" for s in SYSTEM_FOLDERS)))
        return candidate, tuple(f for f in outside if f not in SYSTEM_FOLDERS)
    readable = "that every user can read " if for_all else ""
    raise RewardError(
        f"found no Python {readable}to run programs with in {', '.join(map(str, candidates))}; "
        "install the system's (on Debian and Ubuntu: apt install python3), or set "
        "reward_model.sandbox.python"
    )


@functools.cache
def _folders(python: str) -> tuple[str, ...] | None:
    """Return the installation folders of an interpreter; None if it does not run."""
    ask = "import sys, json; print(json.dumps(sorted({sys.prefix, sys.base_prefix})))"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(json.loads(answer.stdout))


def _open_to_all(path: Path) -> bool:
    """Return whether any user can reach and read `path`."""
    inside = path.resolve()
    return all(p.stat().st_mode & 0o1 for p in (inside, *inside.parents))
