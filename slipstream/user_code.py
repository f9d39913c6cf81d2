"""Classes and functions of a user's own, by the file or module and the name that an option gives.

Knows nothing of what they are for. Called where such an option is read.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from slipstream.errors import ConfigError, DataError, SlipstreamError, did_you_mean

T = TypeVar("T")

_PACKAGE = "pkg://"
"""VERL's mark of a module's dotted name where a file's path could stand."""


_PREFIX = "slipstream_user_"
"""Of the names of modules that files become."""


def load_named(
    path: str | Path,
    name: str,
    *,
    path_key: str,
    name_key: str,
    what: str,
    prefix: str = _PREFIX,
) -> Any:
    """The callable `name` of the file `path`, or of the module `pkg://dotted.name`.

    `path_key` and `name_key` are the options, for messages, and `what` says in the plural what is
    looked for. Raises ConfigError for a missing file or name, and for what does not import.
    """
    module = import_module(path, key=path_key, prefix=prefix)
    found = getattr(module, name, None)
    if not callable(found):
        own = _defined(module)
        hint = did_you_mean(name, own) or "."
        raise ConfigError(
            f"{name_key} {name!r} is not in {str(path)!r}{hint} It defines: "
            f"{', '.join(own) or f'no {what}'}"
        )
    return found


def called(function: Callable[..., T], name: str, /, *args: Any, **kwargs: Any) -> T:
    """What a user's function returns; whatever it raises becomes a `DataError` that names it.

    Errors of Slipstream's own pass.
    """
    try:
        return function(*args, **kwargs)
    except SlipstreamError:
        raise
    except Exception as error:  # user code may raise anything; the reason is passed on
        told = f": {error}" if str(error) else ""
        raise DataError(
            f"{name} failed with {type(error).__name__}{told} (--debug shows where)"
        ) from error


def import_module(path: str | Path, *, key: str, prefix: str = _PREFIX) -> ModuleType:
    """The module of a file, which `pickle` finds again in this process, or of `pkg://dotted.name`.

    Raises ConfigError, which names the option `key`, where it does not import.
    """
    text = str(path)
    if text.startswith(_PACKAGE):
        return _import_package(text.removeprefix(_PACKAGE), key)
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key} {text!r} is not a file: give the path of a Python file")
    # The name depends on the full path, so that two files of one name do not replace each other.
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    name = f"{prefix}{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} {text!r} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything; the reason is passed on
        del sys.modules[name]
        raise ConfigError(
            f"{key} {text!r} does not import: {type(error).__name__}: {error}"
        ) from error
    return module


def _defined(module: ModuleType) -> list[str]:
    """The public functions and classes that are the module's own, sorted."""
    return sorted(
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _import_package(name: str, key: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules in the present folder
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"{key} {_PACKAGE + name!r} does not import: {type(error).__name__}: {error}"
        ) from error
