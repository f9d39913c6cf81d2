"""Properties of all estimators: equal to the reference, independent of order, padding and masked
values."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import AdvantageConfig, AdvantageNeed, adv_needs, get_adv_estimator_fn
from slipstream.algorithms.advantages.gae import compute_gae_advantage_return
from tests.algorithms.advantages.helpers import (
    NAMES,
    WHITENED,
    estimate,
    make_case,
    pad,
    pick,
    plain,
)
from tests.algorithms.advantages.reference import reference

few = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 10_000)
dtypes = st.sampled_from([torch.float64, torch.float32])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-6
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, by_std=st.booleans(), weighted=st.booleans())
def test_equals_the_reference(name: str, seed: int, by_std: bool, weighted: bool) -> None:
    case = replace(make_case(seed), by_std=by_std)
    if not weighted:
        case = replace(case, rollout_is_weights=None, part_weights=None)
    for got, expected in zip(estimate(name, case), reference(name, case), strict=True):
        torch.testing.assert_close(
            got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"grpo_passk"}))
@few
@given(seed=seeds)
def test_equals_the_reference_with_groups_of_one(name: str, seed: int) -> None:
    case = make_case(seed, groups=(1, 3, 1))
    for got, expected in zip(estimate(name, case), reference(name, case), strict=True):
        torch.testing.assert_close(
            got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, order=seeds, dtype=dtypes)
def test_order_of_rows_does_not_matter(
    name: str, seed: int, order: int, dtype: torch.dtype
) -> None:
    case = make_case(seed)
    rows = list(range(len(case.index)))
    random.Random(order).shuffle(rows)
    pairs = zip(estimate(name, pick(case, rows), dtype), estimate(name, case, dtype), strict=True)
    for mixed, straight in pairs:
        assert_same(mixed, straight[rows])


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, extra=st.integers(1, 4), dtype=dtypes)
def test_padding_does_not_matter(name: str, seed: int, extra: int, dtype: torch.dtype) -> None:
    case = make_case(seed)
    pairs = zip(estimate(name, pad(case, extra), dtype), estimate(name, case, dtype), strict=True)
    for wide, narrow in pairs:
        assert_same(wide[:, :-extra], narrow)
        assert not wide[:, -extra:].any()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpg"}))
def test_masked_rows_of_another_group_do_not_matter(name: str) -> None:
    # gpg is excluded, because its alpha depends on the number of rows.
    case = make_case(1)
    rows = list(range(len(case.index)))
    more = pick(case, [*rows, rows[-1], rows[-1]])
    more = replace(more, index=[*case.index, "other", "other"])
    for longer, before in zip(estimate(name, more), estimate(name, case), strict=True):
        torch.testing.assert_close(longer[:-2], before, rtol=1e-12, atol=1e-12)
        assert not longer[-2:].any()


@pytest.mark.parametrize("name", NAMES)
def test_masked_values_do_not_matter(name: str) -> None:
    clean = estimate(name, pad(make_case(2), 1))
    dirty = estimate(name, pad(make_case(2), 1, filler=float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_results_are_float32_unless_rewards_are_float64(name: str) -> None:
    case = make_case(3)
    exact = estimate(name, case)
    for dtype in (torch.float32, torch.bfloat16):
        assert [r.dtype for r in estimate(name, case, dtype)] == [torch.float32] * 2
    assert [r.dtype for r in exact] == [torch.float64] * 2
    for rounded, result in zip(estimate(name, case, torch.float32), exact, strict=True):
        torch.testing.assert_close(rounded.double(), result, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_results_carry_no_gradient(name: str) -> None:
    needs = {need.value for need in adv_needs(name)} & {"values", "old_log_probs", "ref_log_probs"}
    case = make_case(4)
    leaves: dict[str, Any] = {
        key: torch.tensor(getattr(case, key), requires_grad=True) for key in needs
    }
    assert not any(result.requires_grad for result in estimate(name, case, **leaves))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WHITENED)))
def test_batch_without_target_tokens_gives_zeros(name: str) -> None:
    case = plain([1.0, 0.0], "aa")
    advantages, returns = estimate(name, replace(case, mask=[[0.0] * 3] * 2))
    assert not advantages.any()
    assert not returns.any()


@pytest.mark.parametrize("name", WHITENED)
@pytest.mark.parametrize("targets", [0, 1])
def test_rejects_whitening_of_fewer_than_two_tokens(name: str, targets: int) -> None:
    mask = [[0.0] * 3, [0.0, 0.0, float(targets)]]
    with pytest.raises(ValueError, match=f"at least 2 target tokens, got {targets}; .*such as"):
        estimate(name, replace(plain([1.0, 0.0], "aa"), mask=mask))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rejects_a_score_that_is_not_finite(name: str, bad: float) -> None:
    case = plain([0.0, bad], "aa")
    if name == "on_policy_distillation":
        case = replace(case, ref_log_probs=case.rewards)
    with pytest.raises(ValueError, match=r"of row 1 is (nan|inf)"):
        estimate(name, case)


@pytest.mark.parametrize(
    ("name", "need"),
    [(n, need) for n in NAMES for need in sorted(adv_needs(n)) if need != "rollout_is_weights"],
)
def test_missing_input_error_says_what_provides_it(name: str, need: AdvantageNeed) -> None:
    missing: dict[str, Any] = {need.value: None}
    with pytest.raises(ValueError, match=f"'{name}' needs {need.value}, got None; .{{20,}}"):
        estimate(name, make_case(5), **missing)


@pytest.mark.parametrize("name", NAMES)
def test_rejects_different_shapes(name: str) -> None:
    with pytest.raises(ValueError, match="one shape"):
        estimate(name, make_case(6), response_mask=torch.ones(9, 2))


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "reinforce_plus_plus", "opo"])
def test_config_none_means_defaults(name: str) -> None:
    case = make_case(7)
    given_none = estimate(name, case, config=None)
    default = estimate(name, case, config=AdvantageConfig())
    assert all(torch.equal(a, b) for a, b in zip(given_none, default, strict=True))


def test_accepts_verls_order_of_arguments() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)
    advantages, _ = get_adv_estimator_fn("rloo")(rewards, mask, ["a", "a"])
    assert advantages.tolist() == [[-2.0, -2.0], [2.0, 2.0]]


def test_accepts_verls_keywords_with_verls_meaning() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    values = torch.tensor([[0.5, 0.25], [0.0, 0.5]])
    expected = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.25)
    gae = get_adv_estimator_fn("gae")
    for got in (
        gae(rewards, values, mask, 0.5, 0.25),
        gae(token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.5, lam=0.25),
        gae(rewards, values, mask, config={"gamma": 0.5, "lam": 0.25}),
        gae(rewards, values, mask, 0.5, config=AdvantageConfig(gamma=0.9, lam=0.25)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    grpo = get_adv_estimator_fn("grpo")
    more: dict[str, Any]
    for more in (
        {"norm_adv_by_std_in_grpo": False},
        {"config": {"norm_adv_by_std_in_grpo": False}},
        {"config": SimpleNamespace(norm_adv_by_std_in_grpo=False)},
    ):
        advantages, _ = grpo(rewards, mask, ["a", "a"], **more)
        assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    by_one, _ = grpo(rewards, mask, ["a", "a"], epsilon=1 - 0.5**0.5)
    assert by_one.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    remax, _ = get_adv_estimator_fn("remax")(rewards, torch.tensor([0.5, 0.25]), mask)
    assert remax.tolist() == [[0.5, 0.5], [-0.25, -0.25]]
    gpg, _ = get_adv_estimator_fn("gpg")(rewards, mask, ["a", "a"], 1e-6, 2.0, 1.0, None)
    assert gpg.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    # VERL's settings, where unset entries are None.
    given = {"norm_adv_by_std_in_grpo": False, "gdpo_reward_keys": None, "lam": None}
    assert grpo(rewards, mask, ["a", "a"], config=given)[0].tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    for name in ("rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline"):
        estimator = get_adv_estimator_fn(name)
        plain, _ = estimator(rewards, mask, ["a", "a"])
        assert torch.equal(estimator(rewards, mask, ["a", "a"], 1e-6)[0], plain)


@pytest.mark.parametrize("name", NAMES)
def test_rejects_an_unknown_keyword(name: str) -> None:
    with pytest.raises(TypeError, match="has no parameter 'gama'"):
        estimate(name, make_case(6), gama=0.5)


@pytest.mark.parametrize("name", ["gae", "remax"])
def test_requires_a_mask(name: str) -> None:
    with pytest.raises(TypeError, match="needs a response_mask"):
        estimate(name, make_case(6), response_mask=None)
