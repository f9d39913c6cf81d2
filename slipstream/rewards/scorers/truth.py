"""Checks ground truths that are a single answer, so that an answer can be compared with them."""

from __future__ import annotations

import decimal
import math
import numbers
from typing import Any


def text_of(ground_truth: Any, name: str, data_source: str, *, empty: bool = False) -> str:
    """Return the ground truth as text without leading and trailing white space.

    A number becomes the shortest decimal without exponent: 18.0 becomes `18`. `name` is the
    scorer's name, for messages. With `empty`, an empty text is allowed. Raises ValueError if it is
    missing, not finite, or neither text nor a number. Otherwise no response could match it, and all
    would silently count as wrong.
    """
    if not isinstance(ground_truth, numbers.Real) and getattr(ground_truth, "ndim", None) == 0:
        ground_truth = ground_truth.item()  # an array or tensor of one number
    if ground_truth is None:
        raise ValueError(f"{name}: no ground truth (data_source {data_source!r})")
    number = isinstance(ground_truth, numbers.Real | decimal.Decimal)
    if (not number and not isinstance(ground_truth, str)) or isinstance(ground_truth, bool):
        raise ValueError(
            f"{name}: the ground truth must be text or a number, got "
            f"{type(ground_truth).__name__} {str(ground_truth)[:60]} (data_source {data_source!r})"
        )
    if number and not math.isfinite(ground_truth):
        raise ValueError(
            f"{name}: the ground truth is {ground_truth}, in tables often a missing value "
            f"(data_source {data_source!r}); set reward_model.ground_truth in that row"
        )
    text = _plain(str(ground_truth)) if number else str(ground_truth).strip()
    if not text and not empty:
        raise ValueError(f"{name}: the ground truth is empty (data_source {data_source!r})")
    return text


def accepted(ground_truth: Any) -> list[Any]:
    """Return the entries of a list, tuple or array of answers; another value as the only entry."""
    if getattr(ground_truth, "ndim", 0):
        ground_truth = ground_truth.tolist()
    return list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]


def _plain(number: str) -> str:
    """Return a number without exponent and without zeros at the end of its decimals."""
    if "/" in number:  # a fraction
        return number
    text = format(decimal.Decimal(number), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
