"""GRPO and `grpo_passk` against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms import get_adv_estimator_fn, grpo
from tests.algorithms.advantages.helpers import per_row, plain

score = st.integers(-8, 8).map(lambda i: i / 4)


def test_grpo_values() -> None:
    # Mean 1, deviations (-1, 1), sample std sqrt(2).
    out = per_row("grpo", plain([0.0, 2.0], "aa"))
    assert out == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-6)
    # Mean 0.25, squared deviations 3 * 0.0625 + 0.5625 = 0.75, std sqrt(0.75 / 3) = 0.5.
    out = per_row("grpo", plain([1.0, 0.0, 0.0, 0.0], "aaaa"))
    assert out == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_epsilon_is_outside_the_square_root() -> None:
    # std = 1e-6, so A = 1e-6 / sqrt(2) / (1e-6 + 1e-6).
    out = per_row("grpo", plain([0.0, 1e-6 * 2**0.5], "aa"))
    assert out == pytest.approx([-(2**-0.5) / 2, 2**-0.5 / 2], rel=1e-9)


def test_grpo_without_std_is_the_centered_score() -> None:
    case = replace(plain([1.0, 0.0, 0.0, 0.0], "aaaa"), by_std=False)
    assert per_row("grpo", case) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_keeps_the_raw_score_of_a_group_of_one(by_std: bool) -> None:
    case = replace(plain([0.7, 1.0, 0.0], "abb"), by_std=by_std)
    assert per_row("grpo", case)[0] == 0.7


def test_grpo_vectorized_equals_grpo() -> None:
    assert get_adv_estimator_fn("grpo_vectorized") is grpo


@settings(deadline=None, max_examples=25)
@given(scores=st.lists(score, min_size=2, max_size=8), shift=score, scale=st.integers(1, 5))
def test_group_advantages_are_shift_invariant_and_sum_to_zero(
    scores: list[float], shift: float, scale: int
) -> None:
    index = "a" * len(scores)
    for name, by_std in (("grpo", True), ("grpo", False), ("rloo", True)):
        before = per_row(name, replace(plain(scores, index), by_std=by_std))
        changed = [scale * s + shift for s in scores]
        after = per_row(name, replace(plain(changed, index), by_std=by_std))
        factor = 1 if name == "grpo" and by_std else scale
        assert after == pytest.approx([factor * a for a in before], abs=1e-4)
        assert sum(after) == pytest.approx(0.0, abs=1e-9)


def test_passk_rewards_only_the_best_response_by_its_lead() -> None:
    # Scores 3, 1, 2: the lead is 1, the sample std 1.
    case = plain([3.0, 1.0, 2.0], "aaa")
    assert per_row("grpo_passk", case) == pytest.approx([1 / (1 + 1e-6), 0.0, 0.0])
    assert per_row("grpo_passk", replace(case, by_std=False)) == [1.0, 0.0, 0.0]


def test_passk_of_a_tie_is_zero() -> None:
    assert per_row("grpo_passk", plain([3.0, 3.0, 2.0], "aaa")) == [0.0] * 3


def test_passk_rejects_a_group_of_one() -> None:
    with pytest.raises(ValueError, match=r"row 2 is alone in its group; .*rollout\.n to 2"):
        per_row("grpo_passk", plain([1.0, 0.0, 3.0], "aab"))
