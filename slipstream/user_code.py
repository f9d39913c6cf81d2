"""Imports users' functions and classes, named in options by file or module.

It does not know what they are used for.
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
"""verl's prefix for a dotted module name, in options that also take a file path."""


_PREFIX = "slipstream_user_"
"""Prefix of the module names under which files are imported."""


def load_named(
    path: str | Path,
    name: str,
    *,
    path_key: str,
    name_key: str,
    what: str,
    prefix: str = _PREFIX,
) -> Any:
    """Return the callable `name` from the file `path` or from the module `pkg://dotted.name`.

    Messages use the option names `path_key` and `name_key`, and `what`, a plural such as
    "functions". Raises ConfigError if the file or name is missing or the import fails.
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
    """Call a user's function and return its result.

    Its exceptions become a `DataError` that names the function. Slipstream's own errors pass
    unchanged.
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
    """Import a file or `pkg://dotted.name` and return the module. `pickle` can find it again.

    Raises ConfigError, which names the option `key`, if the import fails.
    """
    text = str(path)
    if text.startswith(_PACKAGE):
        return _import_package(text.removeprefix(_PACKAGE), key)
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key} {text!r} is not a file: give the path of a Python file")
    # The module name depends on the full path: two files with the same name stay separate.
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
    """The public functions and classes that the module itself defines, sorted."""
    return sorted(
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _import_package(name: str, key: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, as with `python -m`
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"{key} {_PACKAGE + name!r} does not import: {type(error).__name__}: {error}"
        ) from error
