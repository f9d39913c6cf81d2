"""Advantages against hand-computed values, and what must hold for any rewards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import AdvantageConfig, get_adv_estimator_fn, group_scores

CENTERED = AdvantageConfig(norm_adv_by_std_in_grpo=False)


def estimate(
    name: str, scores: list[float], index: list[str], config: AdvantageConfig | None = None
) -> list[float]:
    """One advantage per row; the score sits on the last of three tokens."""
    rewards = torch.zeros(len(scores), 3)
    rewards[:, -1] = torch.tensor(scores)
    advantages, returns = get_adv_estimator_fn(name)(
        token_level_rewards=rewards,
        response_mask=torch.ones(len(scores), 3),
        index=index,
        config=config or AdvantageConfig(),
    )
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages, advantages[:, :1].expand(-1, 3))
    return [float(a) for a in advantages[:, 0]]


def test_grpo_by_hand() -> None:
    # Mean 1, deviations (-1, 1), sample std sqrt(2).
    out = estimate("grpo", [0.0, 2.0], ["a", "a"])
    assert out == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-6)
    # Mean 0.25, squared deviations 3 * 0.0625 + 0.5625 = 0.75, std sqrt(0.75 / 3) = 0.5.
    out = estimate("grpo", [1.0, 0.0, 0.0, 0.0], ["a"] * 4)
    assert out == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_epsilon_is_outside_the_square_root() -> None:
    # std = 1e-6, so A = 1e-6 / sqrt(2) / (1e-6 + 1e-6).
    spread = 1e-6 * 2**0.5
    out = estimate("grpo", [0.0, spread], ["a", "a"])
    assert out == pytest.approx([-(2**-0.5) / 2, 2**-0.5 / 2], rel=1e-3)


def test_grpo_without_std_is_the_centred_score() -> None:
    assert estimate("grpo", [1.0, 0.0, 0.0, 0.0], ["a"] * 4, CENTERED) == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]


def test_rloo_by_hand() -> None:
    # 3 - mean(1, 2), 1 - mean(3, 2), 2 - mean(3, 1).
    assert estimate("rloo", [3.0, 1.0, 2.0], ["a"] * 3) == [1.5, -1.5, 0.0]
    assert estimate("rloo_vectorized", [3.0, 1.0, 2.0], ["a"] * 3) == [1.5, -1.5, 0.0]


def test_gpg_scales_by_the_share_of_nonzero_scores() -> None:
    # alpha = 4 / 1; mean 0.25.
    assert estimate("gpg", [1.0, 0.0, 0.0, 0.0], ["a"] * 4) == [3.0, -1.0, -1.0, -1.0]
    assert estimate("gpg", [0.0, 0.0], ["a", "a"]) == [0.0, 0.0]


def test_rules_for_a_group_of_one_differ_between_estimators() -> None:
    index = ["alone", "b", "b"]
    scores = [0.7, 1.0, 0.0]
    assert estimate("grpo", scores, index)[0] == pytest.approx(0.7)
    assert estimate("grpo", scores, index, CENTERED)[0] == pytest.approx(0.7)
    assert estimate("rloo", scores, index)[0] == pytest.approx(0.7)
    assert estimate("rloo_vectorized", scores, index)[0] == 0.0


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "gpg"])
def test_groups_are_cut_by_key_and_not_by_position(name: str) -> None:
    grouped = estimate(name, [1.0, 0.0, 5.0, 3.0, 4.0], ["a", "a", "b", "b", "b"])
    mixed = estimate(name, [5.0, 1.0, 3.0, 0.0, 4.0], ["b", "a", "b", "a", "b"])
    assert mixed == pytest.approx([grouped[i] for i in (2, 0, 3, 1, 4)])


@pytest.mark.parametrize("name", ["grpo", "rloo", "rloo_vectorized", "gpg"])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.3, 1e6])
def test_equal_scores_give_exactly_zero(name: str, score: float) -> None:
    assert estimate(name, [score] * 7, ["a"] * 7) == [0.0] * 7


def test_equal_float64_scores_give_exactly_zero_too() -> None:
    group = group_scores(torch.tensor([0.1] * 7 + [0.2] * 3, dtype=torch.float64), "aaaaaaabbb")
    assert group.centered.tolist() == [0.0] * 10
    assert group.std.tolist() == [0.0] * 10


def test_masked_tokens_get_zero_and_rewards_of_all_tokens_count() -> None:
    rewards = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    advantages, _ = get_adv_estimator_fn("rloo")(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a"], config=CENTERED
    )
    assert advantages.tolist() == [[1.0, 0.0, 1.0], [-1.0, -1.0, 0.0]]
    assert advantages.dtype == torch.float32


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="1 keys for scores of shape"):
        group_scores(torch.zeros(2), ["a"])
    with pytest.raises(ValueError, match="score of row 1 is nan"):
        group_scores(torch.tensor([0.0, float("nan")]), ["a", "a"])


score = st.integers(-8, 8).map(lambda i: i / 4)


@settings(deadline=None, max_examples=60)
@given(scores=st.lists(score, min_size=2, max_size=8), shift=score, scale=st.integers(1, 5))
def test_group_relative_advantages_ignore_shifts_and_sum_to_zero(
    scores: list[float], shift: float, scale: int
) -> None:
    index = ["a"] * len(scores)
    changed = [scale * s + shift for s in scores]
    for name, config in (("grpo", None), ("grpo", CENTERED), ("rloo", None)):
        before = estimate(name, scores, index, config)
        after = estimate(name, changed, index, config)
        factor = 1 if name == "grpo" and config is None else scale
        assert after == pytest.approx([factor * a for a in before], abs=1e-4)
        assert sum(after) == pytest.approx(0.0, abs=1e-4)


@settings(deadline=None, max_examples=60)
@given(scores=st.lists(score, min_size=2, max_size=8))
def test_rloo_equals_its_definition(scores: list[float]) -> None:
    n = len(scores)
    expected = [s - (sum(scores) - s) / (n - 1) for s in scores]
    assert estimate("rloo", scores, ["a"] * n) == pytest.approx(expected, abs=1e-5)


def test_numpy_like_and_tensor_free_keys_work() -> None:
    keys: list[tuple[str, int] | int] = [("p", 1), ("p", 1), 7]
    group = group_scores(torch.tensor([1.0, 3.0, 2.0]), keys)
    assert group.count.tolist() == [2.0, 2.0, 1.0]
    assert group.centered.tolist() == [-1.0, 1.0, 0.0]
    assert group.std.tolist() == pytest.approx([2**0.5, 2**0.5, 0.0])
    assert isinstance(group.score, Tensor)
