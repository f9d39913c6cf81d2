"""Reads the YAML files that name users' classes with their settings, in VERL's form."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError, did_you_mean
from slipstream.reading import shown
from slipstream.user_code import created, imported


def read_entries(
    path: str | Path, *, key: str, section: str | None, name_key: str = "class_name"
) -> list[Mapping[str, Any]]:
    """Return the entries of the list `section` in a YAML file that the option `key` names; without
    a section the file is the list. `name_key` is the field that names a class.

    Raises ConfigError if the file cannot be read or has no such list of mappings.
    """
    what = "a list" if section is None else f"a list {section!r}"
    file = Path(path).expanduser()
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{key}={path} cannot be read ({type(error).__name__}: {first}); give the path of a "
            f"YAML file with {what}"
        ) from error
    entries = found
    if section is not None:
        entries = found.get(section) if isinstance(found, Mapping) else None
    good = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    if not good or not entries:
        raise ConfigError(
            f"{key}={path} must have {what} of mappings, each with a {name_key} such as "
            "package.module.Class"
        )
    listed: list[Mapping[str, Any]] = list(entries)
    return listed


def load_class(entry: Mapping[str, Any], *, key: str, name_key: str = "class_name") -> type[Any]:
    """Return the class that an entry names, as `package.module.Class`.

    Raises ConfigError if it cannot be imported or is no class.
    """
    name = entry.get(name_key)
    if not isinstance(name, str) or "." not in name:
        raise ConfigError(
            f"{key}: {name_key} must be a text such as package.module.Class, got {shown(name)}"
        )
    module_name, _, class_name = name.rpartition(".")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, as with `python -m`
    module = imported(
        lambda: importlib.import_module(module_name),
        f"{key}: {name_key} {name!r}",
        f"correct {name_key}, or add the module's folder to PYTHONPATH",
    )
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(
            f"{key}: {name_key} {name!r}: the module {module_name} has no class {class_name!r}"
            f"{did_you_mean(class_name, vars(module))}; correct {name_key}"
        )
    return found


def make_object(cls: type[Any], arguments: Mapping[str, Any], *, key: str) -> Any:
    """Create a user's object. Raises ConfigError if it cannot be created with these arguments."""
    return created(cls, arguments, {}, what=f"{key}: {cls.__qualname__}", own_key=key)
