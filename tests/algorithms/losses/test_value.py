"""The value loss against values computed by hand and against loops, and over micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.algorithms import LossAggMode, Normalizers, compute_value_loss, value_loss


def test_value_loss_values() -> None:
    # Clipped at 0.5: V = 2 with V_old = 1, R = 0 stays 2 (4 > 2.25); V = 2, R = 2 becomes 1.5.
    vpreds = torch.tensor([[2.0, 2.0, 1.2, 5.0]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[0.0, 2.0, 1.0, torch.nan]], dtype=torch.float64)
    values = torch.tensor([[1.0, 1.0, 1.0, torch.inf]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    loss, metrics = value_loss(vpreds, returns, values, mask, cliprange_value=0.5)
    (grad,) = torch.autograd.grad(loss, vpreds)
    assert loss.item() == pytest.approx(0.5 * (4 + 0.25 + 0.04) / 3)
    assert grad[0].tolist() == pytest.approx([2.0 / 3, 0.0, 0.2 / 3, 0.0])
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(5.2 / 3)
    same, clipfrac = compute_value_loss(vpreds, returns, values, mask, 0.5)
    assert same.item() == loss.item()
    assert float(clipfrac) == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", list(LossAggMode))
def test_value_loss_equals_loops_and_adds_up_over_micro_batches(mode: LossAggMode) -> None:
    generator = torch.Generator().manual_seed(2)
    vpreds, returns, values = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    scale = {
        "token-mean": [1 / 6] * 4,
        "token-sum": [1.0] * 4,
        "seq-mean-token-sum": [1 / 3] * 4,
        "seq-mean-token-mean": [1 / 9, 1 / 6, 0.0, 1 / 3],
        "seq-mean-token-sum-norm": [1 / 30] * 4,
    }[mode]
    expected, slopes = 0.0, torch.zeros(4, 3, dtype=torch.float64)
    for i in range(4):
        for t in range(3):
            if not mask[i, t]:
                continue
            v, r, old = float(vpreds[i, t]), float(returns[i, t]), float(values[i, t])
            cut = min(max(v, old - 0.3), old + 0.3)
            expected += 0.5 * scale[i] * max((v - r) ** 2, (cut - r) ** 2)
            if (v - r) ** 2 >= (cut - r) ** 2:
                slopes[i, t] = scale[i] * (v - r)
    norm = Normalizers.from_mask(mask, horizon=10.0)
    leaf = vpreds.clone().requires_grad_()
    parts = []
    for rows in ([0, 3], [2], [1]):
        loss, _ = value_loss(
            leaf[rows],
            returns[rows],
            values[rows],
            mask[rows],
            cliprange_value=0.3,
            loss_agg_mode=mode,
            normalizers=norm,
        )
        torch.autograd.backward(loss)
        parts.append(loss.item())
    assert sum(parts) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(leaf.grad, slopes, rtol=1e-12, atol=1e-15)


def test_the_counts_of_verls_signature_normalize_the_loss() -> None:
    vpreds, returns = torch.tensor([[2.0, 4.0], [0.0, 0.0]]), torch.zeros(2, 2)
    values, mask = vpreds.clone(), torch.tensor([[1.0, 1.0], [0.0, 0.0]])

    def loss(mode: str, *counts: Any) -> float:
        return float(compute_value_loss(vpreds, returns, values, mask, 0.5, mode, *counts)[0])

    # Half the squared errors of 4 and 16, which sum to 10.
    assert loss("token-mean") == pytest.approx(10 / 2)
    assert loss("token-mean", 4, 8) == pytest.approx(4 * 10 / 8)
    assert loss("token-sum", 4) == pytest.approx(4 * 10)
    assert loss("seq-mean-token-sum", 2, None, 5) == pytest.approx(2 * 10 / 5)
    assert loss("seq-mean-token-mean", 2, None, 5) == pytest.approx(2 * 5 / 5)
    assert loss("seq-mean-token-sum-norm", 2, None, 5, 4) == pytest.approx(2 * 10 / (5 * 4))
    with pytest.raises(ValueError, match="pass the mini-batch's batch_num_tokens"):
        loss("token-mean", 2)


def test_the_clip_fraction_is_that_of_the_rows() -> None:
    vpreds, returns = torch.tensor([[2.0, 2.0]]), torch.tensor([[0.0, 2.0]])
    values, mask = torch.ones(1, 2), torch.ones(1, 2)
    _, clipfrac = compute_value_loss(vpreds, returns, values, mask, 0.5, batch_num_tokens=100)
    assert float(clipfrac) == 0.5
    loss, clipfrac = compute_value_loss(vpreds, returns, values, 0 * mask, 0.5, batch_num_tokens=9)
    assert (float(loss), float(clipfrac)) == (0.0, 0.0)


def test_rejects_invalid_input() -> None:
    one = torch.ones(1, 2)
    with pytest.raises(ValueError, match="cliprange_value must be > 0, got 0"):
        value_loss(one, one, one, one, cliprange_value=0.0)
    with pytest.raises(ValueError, match=r"tensors of one shape, got .*\(1, 1\)"):
        value_loss(one, one, one[:, :1], one)
    with pytest.raises(ValueError, match="num_tokens of a mini-batch must be > 0"):
        value_loss(one, one, one, 0 * one)
