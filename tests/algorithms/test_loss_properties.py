"""Loss, metrics and gradients do not depend on order, micro-batches, padding and ranks.

This is tested for every policy loss and every other loss term, in every aggregation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from slipstream.algorithms import (
    LossAggMode,
    Normalizers,
    PolicyLossConfig,
    chunked_full_kl,
    kl_penalty,
    policy_loss_names,
    policy_loss_selection,
)
from slipstream.algorithms.aggregation import sum_loss, zero_masked
from slipstream.algorithms.entropy import entropy_loss
from slipstream.algorithms.full_kl import KLDirection
from slipstream.algorithms.losses.value import value_loss
from slipstream.algorithms.registry import LossMetrics
from tests.algorithms.losses.helpers import (
    CONFIG,
    HORIZON,
    Batch,
    make_batch,
    run,
    with_selection,
)

Term = Callable[[Tensor, Batch, LossAggMode, Normalizers], tuple[Tensor, LossMetrics]]


def kl(kind: str) -> Term:
    """The KL to a reference, as in the trainer: columns are 0 where masked."""

    def loss(
        new: Tensor, batch: Batch, mode: LossAggMode, norm: Normalizers
    ) -> tuple[Tensor, LossMetrics]:
        own, reference = zero_masked(new, batch.mask), zero_masked(batch.old, batch.mask)
        return sum_loss(kl_penalty(own, reference, kind), batch.mask, mode, norm), {}

    return loss


def entropy(
    new: Tensor, batch: Batch, mode: LossAggMode, norm: Normalizers
) -> tuple[Tensor, LossMetrics]:
    return entropy_loss(-new, batch.mask, mode, norm, coeff=0.1), {}


def value(
    new: Tensor, batch: Batch, mode: LossAggMode, norm: Normalizers
) -> tuple[Tensor, LossMetrics]:
    given = batch.advantages, batch.old, batch.mask
    return value_loss(new, *given, loss_agg_mode=mode, normalizers=norm)


def full_kl(direction: KLDirection) -> Term:
    """The KL over a vocabulary of three, with logits made from the columns of log-probs."""

    def loss(
        new: Tensor, batch: Batch, mode: LossAggMode, norm: Normalizers
    ) -> tuple[Tensor, LossMetrics]:
        def hidden(column: Tensor) -> Tensor:
            flat = zero_masked(column, batch.mask).reshape(-1, 1)
            return torch.nn.functional.pad(flat, (0, 3))

        weight = torch.zeros(3, 4).to(new)
        weight[:, 0] = torch.tensor([1.0, -0.5, 0.25])
        each = chunked_full_kl(hidden(new), weight, hidden(batch.old), weight, direction=direction)
        return sum_loss(each.view(new.shape), batch.mask, mode, norm), {}

    return loss


KINDS = ("k1", "abs", "k2", "k3")
TERMS: dict[str, Term] = {
    f"kl {kind}{plus}": kl(kind + plus) for kind in KINDS for plus in ("", "+")
}
TERMS |= {"kl full": full_kl("reverse"), "kl full_forward": full_kl("forward")}
TERMS |= {"entropy": entropy, "value": value}
REINFORCE = "bypass_mode, reinforce"
NAMES = [*policy_loss_names(), REINFORCE, *TERMS]
CASES = [(name, mode) for name in NAMES for mode in LossAggMode]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
ROWS, LENGTH = 6, 5
Outcome = tuple[float, Tensor, dict[str, float]]


def outcome(name: str, batch: Batch, mode: LossAggMode, config: PolicyLossConfig) -> Outcome:
    """(loss, gradient, metrics) of a policy loss or another term."""
    if name == REINFORCE:
        chosen = replace(config.policy_loss, loss_type="reinforce")
        return run("bypass_mode", batch, mode, replace(config, policy_loss=chosen))
    if name not in TERMS:
        return run(name, batch, mode, config)
    norm = config.normalizers or Normalizers.from_mask(batch.mask, horizon=HORIZON)
    leaf = batch.new.clone().requires_grad_()
    loss, metrics = TERMS[name](leaf, batch, mode, norm)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad, {key: float(found) for key, found in metrics.items()}


def selecting(name: str, batch: Batch) -> PolicyLossConfig:
    """Settings with the tokens that the loss selects, if it selects tokens."""
    return with_selection(name, batch) if name in policy_loss_names() else CONFIG


def pad(batch: Batch, width: int) -> Batch:
    """The batch with further masked columns of garbage."""

    def widen(column: Tensor) -> Tensor:
        filler = torch.full((len(column), width), 7.0).to(column)
        if column.is_floating_point():
            filler = filler * torch.nan
        return torch.cat([column, filler], dim=1)

    return replace(batch.map(widen), mask=torch.nn.functional.pad(batch.mask, (0, width)))


def whole(name: str, mode: LossAggMode, batch: Batch) -> Outcome:
    """All rows in one call, with counts and selection by the loss itself and the batch's hashes."""
    return outcome(name, batch, mode, selecting(name, batch))


def in_parts(
    name: str,
    mode: LossAggMode,
    batch: Batch,
    parts: list[tuple[list[int], int]],
    config: PolicyLossConfig,
) -> Outcome:
    """The sum over micro-batches, each with some rows and further columns of padding."""
    grad = torch.zeros_like(batch.new)
    loss, metrics = 0.0, dict[str, float]()
    for rows, width in parts:
        selected = config.selected
        if selected is not None:
            selected = torch.nn.functional.pad(selected[rows], (0, width))
        part = outcome(name, pad(batch.rows(rows), width), mode, replace(config, selected=selected))
        loss += part[0]
        grad[rows] += part[1][:, :LENGTH]
        for key, value in part[2].items():
            metrics[key] = metrics.get(key, 0.0) + value
    return loss, grad, metrics


def assert_same(actual: Outcome, expected: Outcome, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    scale = max(abs(expected[0]), float(expected[1].abs().sum()))
    assert scale > 0
    assert actual[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance * scale)
    torch.testing.assert_close(
        actual[1], expected[1], rtol=tolerance, atol=tolerance * float(expected[1].abs().max())
    )
    assert actual[2] == pytest.approx(expected[2], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("name", "mode"), CASES)
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    order=st.permutations(range(ROWS)),
    owner=st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS),
    widths=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_losses_do_not_depend_on_order_micro_batches_and_padding(
    name: str,
    mode: LossAggMode,
    seed: int,
    order: list[int],
    owner: list[int],
    widths: list[int],
    dtype: torch.dtype,
) -> None:
    batch = make_batch(seed, ROWS, LENGTH, dtype)
    expected = whole(name, mode, batch)

    shuffled = batch.rows(order)
    config = replace(
        selecting(name, shuffled),
        normalizers=Normalizers.from_mask(shuffled.mask, horizon=HORIZON),
    )
    parts = [([i for i, o in enumerate(owner) if o == m], widths[m]) for m in range(4)]
    loss, grad, metrics = in_parts(name, mode, shuffled, [p for p in parts if p[0]], config)
    assert_same((loss, grad[torch.tensor(order).argsort()], metrics), expected, dtype)


SPLIT = ([0, 3], [1, 2, 4, 5])
"""The rows of the two ranks."""
SEED = 17


def test_two_ranks_equal_one_rank(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    results: dict[Any, Outcome] = torch.load(tmp_path / "results.pt")
    assert len(results) == len(CASES) * 2
    for (name, mode, dtype), found in results.items():
        expected = whole(name, LossAggMode(mode), make_batch(SEED, ROWS, LENGTH, dtype))
        assert_same(found, expected, dtype)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SPLIT)
    )
    results: dict[Any, Outcome] = {}
    for dtype in TOLERANCE:
        batch = make_batch(SEED, ROWS, LENGTH, dtype).rows(SPLIT[rank])
        own = Normalizers.from_mask(batch.mask, horizon=HORIZON)
        shares: list[Any] = [None] * len(SPLIT)
        dist.all_gather_object(shares, own)
        normalizers = Normalizers(
            num_tokens=sum(share.num_tokens for share in shares),
            num_sequences=sum(share.num_sequences for share in shares),
            horizon=HORIZON,
        )
        for name, mode in CASES:
            config = replace(
                CONFIG, normalizers=normalizers, selected=_select_over_ranks(name, batch, rank)
            )
            parts = [([row], row) for row in range(len(batch.new))]
            loss, grad, metrics = in_parts(name, mode, batch, parts, config)
            keys = sorted(metrics)
            sums = torch.tensor([loss, *(metrics[key] for key in keys)], dtype=torch.float64)
            dist.all_reduce(sums)
            together = torch.zeros(ROWS, LENGTH, dtype=dtype)
            together[SPLIT[rank]] = grad
            dist.all_reduce(together)
            values = sums.tolist()
            results[name, str(mode), dtype] = (
                values[0],
                together,
                dict(zip(keys, values[1:], strict=True)),
            )
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


def _select_over_ranks(name: str, batch: Batch, rank: int) -> Tensor | None:
    """Gather all target tokens into one row, select, and return this rank's part."""
    select = policy_loss_selection(name) if name in policy_loss_names() else None
    if select is None:
        return None
    targets = batch.mask != 0
    mine = batch.map(lambda column: column[targets])
    gathered: list[Any] = [None] * len(SPLIT)
    dist.all_gather_object(gathered, mine)
    row = Batch(
        **{f.name: torch.cat([getattr(g, f.name) for g in gathered])[None] for f in fields(Batch)}
    )
    chosen = select(row.old, row.new, row.advantages, row.mask, CONFIG, hashes=row.hashes)[0]
    selected = torch.zeros_like(targets)
    start = sum(len(g.new) for g in gathered[:rank])
    selected[targets] = chosen[start : start + len(mine.new)]
    return selected
