"""Losses with selection by covariance: values, and selection over the whole mini-batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import (
    Normalizers,
    PolicyLossConfig,
    PolicyLossModeConfig,
    clip_cov,
    get_policy_loss_fn,
    kl_cov,
    policy_loss_selection,
)
from slipstream.algorithms.losses import select_clip_cov, select_kl_cov
from tests.algorithms.losses.helpers import CONFIG, make_batch, run, with_selection

# Means over the four targets: -2 and 0.5.
LOG_PROB = torch.tensor([[-1.0, -3.0, 50.0], [-3.0, -1.0, 50.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 1.0, 9.0], [-2.0, 1.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])


def config(**settings: float) -> PolicyLossConfig:
    return PolicyLossConfig(policy_loss=PolicyLossModeConfig(**settings))  # type: ignore[arg-type]


def places(selected: Tensor) -> list[list[int]]:
    return selected.nonzero().tolist()


def test_kl_cov_selects_the_highest_covariances() -> None:
    # A - 0.5: 1.5, 0.5, -2.5, 0.5; log_prob + 2: 1, -1, -1, 1: covariances 1.5, -0.5, 2.5, 0.5.
    args = (LOG_PROB, LOG_PROB, ADVANTAGES, MASK)
    assert places(select_kl_cov(*args, config(kl_cov_ratio=0.5))) == [[0, 0], [1, 0]]
    assert places(select_kl_cov(*args, config(kl_cov_ratio=0.49))) == [[1, 0]]
    assert places(select_kl_cov(*args)) == [[1, 0]]  # at least one


def test_clip_cov_selects_the_smallest_hashes_between_its_bounds() -> None:
    args = (LOG_PROB, LOG_PROB, ADVANTAGES, MASK)
    bounds = config(clip_cov_lb=0.0, clip_cov_ub=2.0, clip_cov_ratio=0.25)
    hashes = torch.tensor([[5, 0, -9], [0, 6, -9]])
    assert places(select_clip_cov(*args, bounds, hashes=hashes)) == [[0, 0]]
    hashes[0, 0] = 7
    assert places(select_clip_cov(*args, bounds, hashes=hashes)) == [[1, 1]]
    both = config(clip_cov_lb=0.0, clip_cov_ub=2.0, clip_cov_ratio=1.0)
    assert places(select_clip_cov(*args, both, hashes=hashes)) == [[0, 0], [1, 1]]
    none = config(clip_cov_lb=10.0, clip_cov_ub=20.0)
    assert places(select_clip_cov(*args, none, hashes=hashes)) == []


def test_clip_cov_does_not_select_clipped_tokens() -> None:
    old = LOG_PROB.clone()
    old[0, 0] -= 1.0  # ratio e with A > 0
    settings = config(clip_cov_lb=0.0, clip_cov_ub=2.0, clip_cov_ratio=1.0)
    assert places(select_clip_cov(old, LOG_PROB, ADVANTAGES, MASK, settings)) == [[1, 1]]


def test_clip_cov_values() -> None:
    settings = replace(
        config(clip_cov_lb=0.0, clip_cov_ub=2.0), selected=torch.tensor([[1, 0, 1], [0, 0, 0]]) > 0
    )
    log_prob = LOG_PROB.clone().requires_grad_()
    loss, metrics = clip_cov(LOG_PROB, log_prob, ADVANTAGES, MASK, config=settings)
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx((0 - 1 + 2 - 1) / 4)
    assert grad.tolist() == [[0.0, -0.25, 0.0], [0.5, -0.25, 0.0]]
    assert float(metrics["actor/pg_clipfrac"]) == 0.25


def test_kl_cov_values() -> None:
    old = LOG_PROB - torch.tensor([[0.1, -0.3, 0.0], [0.0, 0.2, 0.0]])
    settings = replace(
        config(ppo_kl_coef=2.0), selected=torch.tensor([[0, 1, 0], [0, 1, 0]], dtype=torch.bool)
    )
    log_prob = LOG_PROB.clone().requires_grad_()
    loss, metrics = kl_cov(old, log_prob, ADVANTAGES, MASK, config=settings)
    (grad,) = torch.autograd.grad(loss, log_prob)
    r = [math.exp(0.1), math.exp(-0.3), 1.0, math.exp(0.2)]
    assert loss.item() == pytest.approx((-2 * r[0] - r[1] + 0.6 + 2 * r[2] - r[3] + 0.4) / 4)
    assert grad[0].tolist() == pytest.approx([-2 * r[0] / 4, (-r[1] - 2) / 4, 0.0])
    assert grad[1].tolist() == pytest.approx([2 * r[2] / 4, (-r[3] + 2) / 4, 0.0])
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(0.6 / 4)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_is_over_the_whole_mini_batch(name: str) -> None:
    batch = make_batch(0)
    whole = with_selection(name, batch).selected
    select = policy_loss_selection(name)
    assert whole is not None
    assert select is not None
    parts = [batch.rows([0, 1]), batch.rows([2, 3, 4, 5])]
    alone = torch.cat(
        [select(b.old, b.new, b.advantages, b.mask, CONFIG, hashes=b.hashes) for b in parts]
    )
    assert not torch.equal(alone, whole)
    norm = Normalizers.from_mask(batch.mask)
    with pytest.raises(ValueError, match=rf"{name} selects .* policy_loss_selection\('{name}'\)"):
        run(name, parts[0], config=replace(CONFIG, normalizers=norm))
    with pytest.raises(ValueError, match=r"selected has shape \(6, 5\), but .* \(2, 5\)"):
        run(name, parts[0], config=replace(CONFIG, normalizers=norm, selected=whole))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("given", [True, False], ids=["lots", "hashed values"])
def test_selection_does_not_depend_on_order_and_padding(name: str, given: bool) -> None:
    select = policy_loss_selection(name)
    assert select is not None
    batch = make_batch(1, rows=12, dtype=torch.float32)
    # Equal tokens have equal covariances, so hashes decide.
    batch = replace(batch, new=batch.new.round(), advantages=batch.advantages.round())

    def choose(order: list[int], padding: int) -> Tensor:
        b = batch.rows(order).map(lambda c: torch.nn.functional.pad(c, (0, padding)))
        hashes = b.hashes if given else None
        chosen = select(b.old, b.new, b.advantages, b.mask, CONFIG, hashes=hashes)
        return chosen[:, :5]

    whole = choose(list(range(12)), 0)
    assert int(whole.sum()) > 3
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        assert torch.equal(choose(order, seed), whole[order])


def test_selection_from_one_flat_row_of_target_tokens() -> None:
    batch = make_batch(2)
    targets = batch.mask != 0
    flat = batch.map(lambda column: column[targets].unsqueeze(0))
    for name in ("clip_cov", "kl_cov"):
        whole, row = with_selection(name, batch).selected, with_selection(name, flat).selected
        assert whole is not None
        assert row is not None
        assert torch.equal(whole[targets], row[0])


def test_loss_without_selection_selects_among_its_rows() -> None:
    batch = make_batch(3)
    for name in ("clip_cov", "kl_cov"):
        select = policy_loss_selection(name)
        assert select is not None
        chosen = select(batch.old, batch.new, batch.advantages, batch.mask, CONFIG)
        expected = run(name, batch, config=replace(CONFIG, selected=chosen))
        own = run(name, batch)
        assert own[0] == expected[0]
        assert own[2] == expected[2]
    assert get_policy_loss_fn("clip_cov") is clip_cov
