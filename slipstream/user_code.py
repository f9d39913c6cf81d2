"""Imports users' functions and classes, named in options by file or module.

It does not know what they are used for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from slipstream.errors import (
    ConfigError,
    DataError,
    SlipstreamError,
    did_you_mean,
    reason_of,
    shortened,
)

T = TypeVar("T")

_PACKAGE = "pkg://"
"""verl's prefix for a dotted module name, in options that also take a file path."""


_IMPORTS = {
    "verl": "import slipstream.compat.verl instead of verl (docs/from_verl.md)",
    "slime": "import slipstream.compat.slime instead of slime (docs/agents.md)",
}
"""What to do if a user's module imports another system."""

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
    try:
        found = getattr(module, name, None)  # a module may define __getattr__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"{name_key} {name!r} cannot be read from {str(path)!r}: {reason_of(error)}"
        ) from error
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

    Its exceptions, and SystemExit, become a `DataError` that names the function. Slipstream's own
    errors and Ctrl-C pass unchanged.
    """
    try:
        return function(*args, **kwargs)
    except (SlipstreamError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may raise anything; the reason is passed on
        raise DataError(f"{name} failed with {reason_of(error)} (--debug shows where)") from error


def created(
    cls: type[T], given: Mapping[str, Any], own: Mapping[str, Any], *, what: str, own_key: str
) -> T:
    """Create an object of a user's class with Slipstream's arguments `given` and the user's `own`.

    Messages begin with `what`, and `own_key` is the option that has `own`. Raises ConfigError if a
    name is in both, or if the constructor does not take the arguments. Exceptions of the
    constructor become errors as in `called`.
    """
    clash = sorted(given.keys() & own.keys())
    if clash:
        raise ConfigError(
            f"{own_key} must not contain {', '.join(clash)}: Slipstream passes these itself"
        )
    arguments = {**given, **own}
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError) as error:  # ValueError: a built-in constructor has no signature
        raise ConfigError(
            f"{what} cannot be created with {', '.join(arguments)}: {error}; set {own_key} to its "
            "own options"
        ) from error
    return called(cls, f"{cls.__name__}(...)", **arguments)


def import_module(path: str | Path, *, key: str, prefix: str = _PREFIX) -> ModuleType:
    """Import a file or `pkg://dotted.name` and return the module. `pickle` can find it again.

    Raises ConfigError, which names the option `key`, if the import fails.
    """
    text = str(path)
    if text.startswith(_PACKAGE):
        return _import_package(text.removeprefix(_PACKAGE), key)
    try:
        file = Path(path).expanduser()
        exists = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, no such user
        raise ConfigError(
            f"{key} {shortened(text, 200)!r} is not a file ({reason_of(error)}): give the path of "
            "a Python file"
        ) from error
    if not exists:
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
        imported(partial(spec.loader.exec_module, module), f"{key} {text!r}")
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def imported(load: Callable[[], T], what: str, remedy: str = "") -> T:
    """Call `load`, which imports a user's module, and return its result.

    Whatever the module raises becomes a ConfigError that begins with `what`, and ends with `remedy`
    if that is given. SystemExit, and an import of verl or slime, have a remedy of their own. Ctrl-C
    passes unchanged.
    """
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if type(error) is ModuleNotFoundError:
            remedy = _IMPORTS.get(str(error.name).split(".")[0], remedy)
        if issubclass(type(error), SystemExit):
            # Otherwise `sys.exit()` would end the command with status 0, as if it had succeeded.
            remedy = 'remove the call of sys.exit, or move it under `if __name__ == "__main__":`'
        more = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{what} does not import: {reason_of(error)}{more}") from error


def _defined(module: ModuleType) -> list[str]:
    """The public functions and classes that the module itself defines, sorted."""
    return sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and _is_own(value, module.__name__)
    )


def _is_own(value: Any, module: str) -> bool:
    """Return whether a callable was defined in that module. An object may refuse the question."""
    try:
        return callable(value) and bool(getattr(value, "__module__", None) == module)
    except Exception:
        return False


def _import_package(name: str, key: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, as with `python -m`
    return imported(lambda: importlib.import_module(name), f"{key} {_PACKAGE + name!r}")
