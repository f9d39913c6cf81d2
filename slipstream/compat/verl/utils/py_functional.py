"""verl's module `verl.utils.py_functional`: functions of dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.rewards.data_columns import check_agree

__all__ = ["append_to_dict", "union_two_dict"]


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the entries of `dict2` to `dict1` and return it.

    Raises ValueError if a shared key has different values.
    """
    check_agree(dict1, dict2, "both dictionaries have")
    for key, value in dict2.items():
        dict1[key] = value
    return dict1


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list `data[prefix + key]`, which is made if needed."""
    for key, value in new_data.items():
        data.setdefault(f"{prefix}{key}", []).append(value)
