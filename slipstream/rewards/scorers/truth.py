"""Checks ground truths that are a single answer, so that an answer can be compared with them."""

from __future__ import annotations

import numbers
from typing import Any


def text_of(ground_truth: Any, name: str, data_source: str, *, empty: bool = False) -> str:
    """Return the ground truth as text without leading and trailing white space.

    `name` is the scorer's name, for messages. With `empty`, an empty text is allowed. Raises
    ValueError if it is missing, or neither text nor a number. Otherwise no response could match it,
    and all would silently count as wrong.
    """
    if ground_truth is None:
        raise ValueError(f"{name}: no ground truth (data_source {data_source!r})")
    number = isinstance(ground_truth, numbers.Real) and not isinstance(ground_truth, bool)
    if not number and not isinstance(ground_truth, str):
        raise ValueError(
            f"{name}: the ground truth must be text or a number, got "
            f"{type(ground_truth).__name__} {str(ground_truth)[:60]} (data_source {data_source!r})"
        )
    text = str(ground_truth).strip()
    if not text and not empty:
        raise ValueError(f"{name}: the ground truth is empty (data_source {data_source!r})")
    return text
