"""Short answers in tags are scored."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.rewards.scorers.search_qa import compute_score, extract_answer


@pytest.mark.parametrize(
    ("response", "target", "whole", "part"),
    [
        ("", "Paris", 0.0, 0.0),
        ("Paris", "Paris", 0.0, 0.0),
        ("<answer>Paris</answer>", "Paris", 1.0, 1.0),
        ("<answer> paris </answer>", "Paris", 1.0, 1.0),
        ("<answer>\nPARIS\n</answer>", "Paris", 1.0, 1.0),
        ("<answer>Paris.</answer>", "Paris", 1.0, 1.0),
        ("<answer>The Paris</answer>", "Paris", 1.0, 1.0),
        ("<answer>Theparis</answer>", "Paris", 0.1, 1.0),
        ("<answer>Paris, France</answer>", "Paris", 0.1, 1.0),
        ("<answer>London</answer>", "Paris", 0.1, 0.1),
        ("<answer></answer>", "Paris", 0.1, 0.1),
        ("<answer>Paris", "Paris", 0.0, 0.0),
        ("Paris</answer>", "Paris", 0.0, 0.0),
        ("<answer>London</answer><answer>Paris</answer>", "Paris", 1.0, 1.0),
        ("<answer>Paris</answer><answer>London</answer>", "Paris", 0.1, 0.1),
        ("<answer>Paris</answer>" * 10, "Paris", 1.0, 1.0),
        ("<answer>Paris</answer>" * 11, "Paris", 0.25, 0.25),
        ("<answer>Paris</answer>" + "</answer>" * 10, "Paris", 0.25, 0.25),
        ("<answer>5</answer>", 5.0, 1.0, 1.0),
        ("<answer>50</answer>", 5.0, 0.1, 1.0),
        ("<answer>5</answer>", [4, 5], 1.0, 1.0),
        ("<answer>London</answer>" * 11, "Paris", 0.1, 0.1),
        ("<answer>Lutetia</answer>", ["Paris", "Lutetia"], 1.0, 1.0),
        ("<answer>U.S.A.</answer>", "USA", 1.0, 1.0),
        ("<answer>1,000</answer>", "1000", 1.0, 1.0),
        ("<answer>São Paulo</answer>", "são paulo", 1.0, 1.0),
        ("<answer>Sao Paulo</answer>", "São Paulo", 0.1, 0.1),
        ("<ANSWER>Paris</ANSWER>", "Paris", 0.0, 0.0),
        ("<answer>an  answer</answer>", "answer", 1.0, 1.0),
        ("x" * 1_000_000 + "<answer>Paris</answer>", "Paris", 1.0, 1.0),
    ],
)
def test_scores(response: str, target: Any, whole: float, part: float) -> None:
    arguments = "searchR1_nq", response, {"target": target}
    assert compute_score(*arguments, format_score=0.1) == whole
    assert compute_score(*arguments, format_score=0.1, part=True) == part


def test_the_last_closed_answer_is_extracted() -> None:
    assert extract_answer("<answer>a</answer> <answer>b") == "a"
    assert extract_answer("<answer><answer>a</answer>") == "a"


@pytest.mark.parametrize("truth", [None, "Paris", {}, {"target": None}, {"target": []}])
def test_a_ground_truth_without_target_raises(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"must be \{'target': \[\.\.\.\]\}"):
        compute_score("searchR1_nq", "<answer>a</answer>", truth)
