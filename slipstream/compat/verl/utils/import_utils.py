"""verl's module `verl.utils.import_utils`: objects of Python files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.user_code import load_named

__all__ = ["load_extern_object", "load_extern_type"]


def load_extern_object(module_path: str | Path, object_name: str) -> Any:
    """Return a function or class of a Python file, or of a module `pkg://dotted.name`.

    Raises ConfigError if the file or the name is missing.
    """
    return load_named(
        module_path, object_name, path_key="module_path", name_key="object_name", what="objects"
    )


def load_extern_type(file_path: str | Path, type_name: str) -> Any:
    """Return a class of a Python file. Raises ConfigError if the file or the name is missing."""
    return load_named(
        file_path, type_name, path_key="file_path", name_key="type_name", what="classes"
    )
