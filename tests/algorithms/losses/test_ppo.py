"""PPO's objective: values, gradients and signs, and the functional forms over logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import (
    PolicyLossConfig,
    compute_policy_loss,
    get_policy_loss_fn,
    grpo_loss,
    ppo_loss,
    vanilla,
)


def one_token(
    ratio: float,
    advantage: float,
    config: PolicyLossConfig | None = None,
    weight: float | None = None,
) -> tuple[float, float, dict[str, float]]:
    """(loss, d loss / d log_prob, metrics) of `vanilla` for one token."""
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, metrics = vanilla(
        torch.zeros(1, 1, dtype=torch.float64),
        log_prob,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1),
        "token-mean",
        config,
        None if weight is None else torch.tensor([[weight]], dtype=torch.float64),
    )
    torch.autograd.backward(loss)
    assert log_prob.grad is not None
    return loss.item(), float(log_prob.grad), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.4, 0.0, 1, 0),  # above 1 + 0.2: no more to gain
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # too low with A > 0: the gradient pulls it up
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # below 1 - 0.2: no more to gain
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # too high with A < 0: pulled down
        (4.0, -2.0, 6.0, 0.0, 0, 1),  # the dual clip bounds it at 3 |A|
        (4.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_vanilla_values(
    ratio: float, advantage: float, loss: float, grad: float, clipped: int, dual: int
) -> None:
    value, slope, metrics = one_token(ratio, advantage)
    assert value == pytest.approx(loss)
    assert slope == pytest.approx(grad)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == dual
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_separate_clip_bounds() -> None:
    config = PolicyLossConfig(clip_ratio=0.5, clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert one_token(1.4, 1.0, config)[0] == pytest.approx(-1.3)
    assert one_token(0.5, -1.0, config)[0] == pytest.approx(0.9)
    wide = PolicyLossConfig(clip_ratio=0.5)
    assert one_token(1.4, 1.0, wide)[0] == pytest.approx(-1.4)
    assert one_token(0.4, -1.0, wide)[0] == pytest.approx(0.5)


def test_dual_clip_bound_is_a_setting() -> None:
    assert one_token(4.0, -1.0, PolicyLossConfig(clip_ratio_c=2.0))[0] == pytest.approx(2.0)


def test_importance_weights_multiply_the_loss_without_gradient() -> None:
    loss, slope, _ = one_token(1.1, 2.0, weight=0.5)
    assert loss == pytest.approx(-1.1)
    assert slope == pytest.approx(-1.1)
    weights = torch.full((1, 1), 0.5, requires_grad=True)
    log_prob = torch.zeros(1, 1, requires_grad=True)
    one = torch.ones(1, 1)
    for name in ("vanilla", "gpg"):
        loss_tensor, _ = get_policy_loss_fn(name)(
            torch.zeros(1, 1), log_prob, one, one, "token-mean", None, weights
        )
        torch.autograd.backward(loss_tensor)
    assert weights.grad is None


def test_huge_log_ratios_stay_finite() -> None:
    log_prob = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, _ = vanilla(
        torch.tensor([[-1000.0, -torch.inf]]),
        log_prob,
        torch.tensor([[-1.0, 1.0]]),
        torch.tensor([[1.0, 0.0]]),
    )
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(3.0)
    assert log_prob.grad is not None
    assert bool(log_prob.grad.isfinite().all())


@pytest.mark.parametrize("name", ["vanilla", "gpg"])
def test_descending_the_loss_raises_good_tokens_and_lowers_bad_ones(name: str) -> None:
    logits = torch.zeros(2, 1, 4, requires_grad=True)
    log_prob = torch.log_softmax(logits, dim=-1)[..., 2]
    loss, _ = get_policy_loss_fn(name)(
        log_prob.detach(), log_prob, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1)
    )
    torch.autograd.backward(loss)
    assert logits.grad is not None
    step = -logits.grad[:, 0]
    assert float(step[0, 2]) > 0 > float(step[0, 0])
    assert float(step[1, 2]) < 0 < float(step[1, 0])


def test_all_losses_have_equal_gradients_on_policy() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (3, 4), generator=generator)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
    advantages = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    old = torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def grad_of(kind: str) -> Tensor:
        z = logits.clone().requires_grad_()
        if kind == "grpo_loss":
            loss = grpo_loss(z, labels, mask, advantages)
        elif kind == "ppo_loss":
            loss = ppo_loss(z, labels, mask, advantages, old)
        else:
            log_prob = torch.log_softmax(z, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            per_token = advantages.unsqueeze(-1).expand(-1, 4)
            loss, _ = get_policy_loss_fn(kind)(old, log_prob, per_token, mask)
        (grad,) = torch.autograd.grad(loss, z)
        return grad

    expected = grad_of("gpg")
    assert float(expected.abs().sum()) > 0
    for kind in ("vanilla", "grpo_loss", "ppo_loss"):
        torch.testing.assert_close(grad_of(kind), expected)


@pytest.mark.parametrize("kind", ["grpo_loss", "ppo_loss"])
def test_functional_losses_and_gradients_equal_loops(kind: str) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(6, (4, 5), generator=generator)
    mask = (torch.rand(4, 5, generator=generator) < 0.7).double()
    advantages = torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=torch.float64)
    old = -3 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    z = logits.clone().requires_grad_()
    loss = (
        grpo_loss(z, labels, mask, advantages)
        if kind == "grpo_loss"
        else ppo_loss(z, labels, mask, advantages, old)
    )
    (grad,) = torch.autograd.grad(loss, z)
    total, slopes, binds = 0.0, torch.zeros_like(logits), 0
    for b in range(4):
        for t in range(5):
            if not mask[b, t]:
                continue
            exps = [math.exp(x) for x in logits[b, t].tolist()]
            p = [x / sum(exps) for x in exps]
            a, label = float(advantages[b]), int(labels[b, t])
            if kind == "grpo_loss":
                total, slope = total - a * math.log(p[label]), -a
            else:
                ratio = p[label] / math.exp(float(old[b, t]))
                clipped = min(max(ratio, 0.8), 1.2)
                total += max(-a * ratio, -a * clipped)
                slope = -a * ratio if -a * ratio >= -a * clipped else 0.0
                binds += slope == 0.0
            for v in range(6):
                slopes[b, t, v] = slope * ((v == label) - p[v])
    n = float(mask.sum())
    assert loss.item() == pytest.approx(total / n, rel=1e-12)
    torch.testing.assert_close(grad, slopes / n, rtol=1e-10, atol=1e-14)
    assert binds or kind == "grpo_loss"


def test_functional_losses_values() -> None:
    # Label probabilities: 0.5, 0.25 in the first row; 0.75 and a masked token in the second.
    logits = torch.tensor([[[0.5, 0.5], [0.25, 0.75]], [[0.25, 0.75], [0.5, 0.5]]]).log()
    labels = torch.tensor([[0, 0], [1, 1]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    advantages = torch.tensor([1.0, -2.0])
    expected = (-math.log(0.5) - math.log(0.25) + 2 * math.log(0.75)) / 3
    assert float(grpo_loss(logits, labels, mask, advantages)) == pytest.approx(expected)
    # Ratios 2 (clipped to 1.2), 1, and 3 (A < 0: not clipped, no dual clip).
    old = torch.tensor([[0.25, 0.25], [0.25, 0.9]]).log()
    assert float(ppo_loss(logits, labels, mask, advantages, old)) == pytest.approx(
        (-1.2 - 1.0 + 6.0) / 3
    )
    assert float(ppo_loss(logits, labels, mask, advantages, old, 0.5)) == pytest.approx(
        (-1.5 - 1.0 + 6.0) / 3
    )


def test_compute_policy_loss_returns_vanillas_four_numbers() -> None:
    old, new, advantages = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 5)
    config = PolicyLossConfig(clip_ratio=0.2, clip_ratio_high=0.3, clip_ratio_c=2.0)
    loss, metrics = vanilla(old, new, advantages, mask, "seq-mean-token-sum", config)
    four = compute_policy_loss(
        old, new, advantages, mask, 0.2, None, 0.3, 2.0, "seq-mean-token-sum"
    )
    assert [float(value) for value in four] == [
        float(loss),
        *(float(metrics[f"actor/{key}"]) for key in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")),
    ]
    with pytest.raises(ValueError, match="needs cliprange, or cliprange_low and cliprange_high"):
        compute_policy_loss(old, new, advantages, mask, cliprange_low=0.2)
