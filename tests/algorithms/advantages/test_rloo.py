"""RLOO against values computed by hand, and against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.advantages.helpers import per_row, plain


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_values(name: str) -> None:
    # 3 - mean(1, 2), 1 - mean(3, 2), 2 - mean(3, 1).
    assert per_row(name, plain([3.0, 1.0, 2.0], "aaa")) == [1.5, -1.5, 0.0]


def test_rloo_and_rloo_vectorized_differ_on_a_group_of_one() -> None:
    case = plain([0.7, 1.0, 0.0], "abb")
    assert per_row("rloo", case) == [0.7, 1.0, -1.0]
    assert per_row("rloo_vectorized", case) == [0.0, 1.0, -1.0]


@settings(deadline=None, max_examples=25)
@given(scores=st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=8))
def test_rloo_equals_its_definition(scores: list[float]) -> None:
    n = len(scores)
    expected = [s - (sum(scores) - s) / (n - 1) for s in scores]
    assert per_row("rloo", plain(scores, "a" * n)) == pytest.approx(expected, abs=1e-12)
