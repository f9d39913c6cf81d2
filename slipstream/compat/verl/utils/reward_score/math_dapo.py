"""verl's module `verl.utils.reward_score.math_dapo`: answers after "Answer:" (DAPO, AIME)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slipstream.compat.verl.utils.reward_score.boxes import BOXED, braced, unwrapped
from slipstream.rewards.scorers import math_dapo as scorer

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]

_TAIL, _BOX_TAIL = 300, 100
"""Characters at the end of a response that are searched for an answer, and for a box."""


def normalize_final_answer(final_answer: str) -> str:
    """Return the normal form of an answer (Minerva's rules)."""
    return scorer.normalised(final_answer)


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}` with its command; None without one, or if it is not closed."""
    start = string.rfind(BOXED + "{")
    return None if start < 0 else braced(string, start)


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{...}`. Raises AssertionError, as verl does, without a box."""
    return unwrapped(s, BOXED)


def is_correct_minerva(
    solution_str: str,
    gt: str,
    gt_need_extract: bool = False,
    answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)",
) -> tuple[bool, str]:
    """Return whether the last answer in the text is the ground truth, and its normal form.

    `answer_pattern` has one group, the answer; without a match the form is `[INVALID]`. With
    `gt_need_extract`, the ground truth is the content of a box, and AssertionError is raised if it
    has none.
    """
    found = re.findall(answer_pattern, solution_str)
    pred = normalize_final_answer(found[-1]) if found else scorer.NO_ANSWER
    if gt_need_extract:
        gt = remove_boxed(last_boxed_only_string(gt) or "")
    return pred == normalize_final_answer(gt), pred


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None
) -> tuple[int, str | None]:
    """Return 1 if the last box is exactly the ground truth, else -1, and the content of the box.

    The last 100 characters are searched, or if the four positions of pause tokens are given, the
    text from 100 characters before the last position on. Raises ValueError for another number of
    positions.
    """
    start = -_BOX_TAIL
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise ValueError(f"pause_tokens_index must have 4 positions, got {pause_tokens_index}")
        start += pause_tokens_index[-1]
    box = last_boxed_only_string(pred[start:])
    content = None if box is None else remove_boxed(box)
    return 1 if content == gt else -1, content


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> tuple[bool, str | None]:
    """Return whether the response is correct, and the answer that was found in it.

    The answer is the normalized text after the last "Answer:", else the normalized content of the
    last box, else `[INVALID]`. With `strict_box_verify` it is the content of the last box, or None,
    and must equal `answer` exactly.
    """
    sign, box = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    if strict_box_verify:
        return sign == 1, box
    correct, pred = is_correct_minerva(solution_str, answer)
    if pred == scorer.NO_ANSWER and box is not None:
        pred = normalize_final_answer(box)
        correct = pred == normalize_final_answer(answer)
    return correct, pred


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return `score` (1.0 if correct, else -1.0), `acc` (whether correct) and `pred` (the answer).

    Only the last 300 characters are read. `strict_box_verify` is described in `verify`. Raises
    ValueError if there is no ground truth.
    """
    if not strict_box_verify:
        return scorer.compute_score("", solution_str, ground_truth)
    correct, pred = verify(solution_str[-_TAIL:], ground_truth, True, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
