"""Ground truths of one answer: what a row must have so that an answer can be compared with it."""

from __future__ import annotations

import numbers
from typing import Any


def text_of(ground_truth: Any, name: str, data_source: str, *, empty: bool = False) -> str:
    """The ground truth as text, without outer white space. `name` is the scorer's; `empty`: an
    empty text is one, too.

    Raises ValueError where there is none, and for what is neither text nor a number: no response
    could equal it, and all of them would be wrong without a word.
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
