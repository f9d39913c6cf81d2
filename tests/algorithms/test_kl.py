"""KL estimators and controllers against values computed by hand and loops."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
    subtract_kl,
)
from slipstream.algorithms.kl import KL_KINDS

LP = torch.tensor([-1.0, -2.0])
REF = torch.tensor([-1.5, -1.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [0.5, -1.0]),
        ("k1", [0.5, -1.0]),
        ("abs", [0.5, 1.0]),
        ("mse", [0.125, 0.5]),
        ("k2", [0.125, 0.5]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, math.e - 2.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0]),
    ],
)
def test_values_of_all_kinds(kind: str, expected: list[float]) -> None:
    assert kl_penalty(LP, REF, kind).tolist() == pytest.approx(expected)
    assert kl_penalty(LP, REF, kind + "+").tolist() == kl_penalty(LP, REF, kind).tolist()


def grad(kind: str) -> list[float]:
    lp = LP.clone().requires_grad_()
    torch.autograd.backward(kl_penalty(lp, REF, kind).sum())
    assert lp.grad is not None
    out: list[float] = lp.grad.tolist()
    return out


def test_gradients() -> None:
    assert grad("k1") == [1.0, 1.0]
    assert grad("k2") == [0.5, -1.0]
    assert grad("k3") == pytest.approx([1 - math.exp(-0.5), 1 - math.e])
    assert grad("abs") == [1.0, -1.0]
    # Where k3 is clamped, its gradient is 0.
    far = torch.tensor([-100.0, 0.0], requires_grad=True)
    kl_penalty(far, torch.tensor([0.0, -100.0]), "k3").sum().backward()  # type: ignore[no-untyped-call]
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.0]


def loops(kind: str, lp: float, ref: float) -> tuple[float, float]:
    """The value and its derivative with respect to `lp`."""
    d = lp - ref
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.rstrip("+"), kind.rstrip("+"))
    ratio = math.exp(min(max(-d, -20.0), 20.0))
    k3 = ratio - 1 + min(max(d, -20.0), 20.0)
    value = {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": min(k3, 10.0)}[name]
    inside = k3 < 10 and abs(d) < 20
    slope = {"k1": 1.0, "abs": math.copysign(1, d), "k2": d, "k3": (1 - ratio) * inside}[name]
    return value, d if kind.endswith("+") else slope


@pytest.mark.parametrize("kind", [kind + plus for kind in KL_KINDS for plus in ("", "+")])
def test_values_and_gradients_equal_loops(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    lp = (-4 * torch.rand(300, generator=generator, dtype=torch.float64)).requires_grad_()
    ref = -4 * torch.rand(300, generator=generator, dtype=torch.float64)
    kl = kl_penalty(lp, ref, kl_penalty=kind)
    (grad,) = torch.autograd.grad(kl.sum(), lp)
    pairs = [loops(kind, *pair) for pair in zip(lp.tolist(), ref.tolist(), strict=True)]
    values, slopes = torch.tensor(pairs, dtype=torch.float64).T
    torch.testing.assert_close(kl.detach(), values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, slopes, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_plus_suffix_has_the_gradient_of_k2(kind: str) -> None:
    assert grad(kind + "+") == grad("k2")


def test_k3_is_clamped_on_both_sides() -> None:
    far = kl_penalty(torch.tensor([-100.0, 0.0]), torch.tensor([0.0, -100.0]), "k3")
    assert far.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_average_to_the_kl_of_two_bernoullis(kind: str) -> None:
    p, q = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])
    exact = float((p * (p / q).log()).sum())
    estimate = float((p * kl_penalty(p.log(), q.log(), kind)).sum())
    # k2 has a bias of third order in the log-ratio.
    assert estimate == pytest.approx(exact, abs=2e-3 if kind == "k2" else 1e-6)


def test_rejects_unknown_and_full_kl_kinds() -> None:
    for kind in ("full", "full_forward"):
        computed = (
            rf"'{kind}' sums over .* actor_rollout_ref.actor.kl_loss_type={kind} or "
            rf"algorithm.kl_penalty={kind}"
        )
        for suffix in ("", "+"):
            with pytest.raises(ValueError, match=computed):
                kl_penalty(LP, REF, kind + suffix)
    with pytest.raises(ValueError, match="unknown kl penalty 'k4'; known: kl, k1"):
        kl_penalty(LP, REF, "k4")


def test_adaptive_controller_values() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.5, horizon=100)
    controller.update(0.55, n_steps=10)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    controller.value = 0.1
    controller.update(50.0, n_steps=10)  # clipped to 0.2
    assert controller.value == pytest.approx(0.1 * 1.02)
    controller.value = 0.1
    controller.update(0.0, n_steps=10)  # clipped to -0.2
    assert controller.value == pytest.approx(0.1 * 0.98)


def test_rejects_steps_that_could_make_the_coefficient_negative() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=20)
    controller.update(0.0, 99)
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 99 / 20))
    with pytest.raises(ValueError, match="100 sequences in one step could turn"):
        controller.update(0.0, 100)
    for wrong in ({"target_kl": 0.0}, {"horizon": 0}, {"target_kl": float("nan")}):
        with pytest.raises(ValueError, match="needs target_kl > 0 and horizon > 0"):
            get_kl_controller("adaptive", kl_coef=0.1, **wrong)


def test_rejects_two_plus_suffixes() -> None:
    with pytest.raises(ValueError, match=r"unknown kl penalty 'k1\+\+'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k1++")


def test_controllers_by_name() -> None:
    fixed = get_kl_controller("fixed", kl_coef=0.3)
    fixed.update(100.0, n_steps=1000)
    assert fixed.value == 0.3
    assert isinstance(get_kl_controller("adaptive", kl_coef=0.3), AdaptiveKLController)
    with pytest.raises(ValueError, match="known: fixed, adaptive"):
        get_kl_controller("linear", kl_coef=0.3)
    with pytest.raises(ValueError, match=r"horizon > 0, got target_kl=0\.1, horizon=0"):
        get_kl_controller("adaptive", kl_coef=0.3, horizon=0)


def test_in_reward_kl_values() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0, float("nan")], [-1.0, -2.0, -1.0], [0.0, 0.0, 0.0]])
    ref = torch.tensor([[-2.0, -2.0, 0.0], [-1.5, -1.5, -1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    controller = FixedKLController(0.1)
    rewards, metrics = apply_kl_penalty(scores, old, ref, mask, kl_ctrl=controller)
    torch.testing.assert_close(
        rewards, torch.tensor([[-0.1, 0.9, 0.0], [-0.05, 0.05, 2.0], [0.0, 0.0, 0.0]])
    )
    # Row means are 1 and 0; the empty row does not count.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_subtract_kl_subtracts_a_given_kl() -> None:
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    kl = torch.tensor([[0.5, 1.5], [3.0, float("nan")]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    rewards, metrics = subtract_kl(scores, kl, mask, kl_ctrl=FixedKLController(0.1))
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.85], [1.7, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((1.0 + 3.0) / 2)
    with pytest.raises(ValueError, match="empty response mask"):
        subtract_kl(scores, kl, 0 * mask, kl_ctrl=FixedKLController(0.1))


def test_in_reward_kl_updates_the_controller_after_use() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=4)
    one = torch.ones(2, 1)
    _, metrics = apply_kl_penalty(0 * one, one, 0 * one, one, kl_ctrl=controller)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 4))
