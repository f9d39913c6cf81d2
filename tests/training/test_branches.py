"""Rows that are the branches of one episode: losses, gradients and advantages equal those of the
same episode as one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.algorithms import AdvantageConfig
from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.settings import PolicyLossConfig
from slipstream.errors import DataError
from slipstream.rollout.train_rows import fill_advantages
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.training.columns import select_rows, train_batch
from slipstream.training.fsdp2 import Ranks, ShardedBackend
from slipstream.training.losses import policy_loss_fn
from slipstream.training.packing import SequenceLayout, plan_sequences
from slipstream.types import TrainBatch, TrainRow
from tests.training.helpers import (
    gradients,
    make_rows,
    relative_difference,
    tiny_backend,
    tiny_decoder,
    weights,
)
from tests.training.ranks import on_ranks

LENGTHS = [21, 14, 30]


def turns_of(row: TrainRow) -> list[range]:
    """Two turns of the policy with an observation of two tokens between them."""
    middle = (3 + len(row.tokens)) // 2
    return [range(3, middle - 1), range(middle + 1, len(row.tokens))]


def one_row(row: TrainRow) -> TrainRow:
    sampled = {place for turn in turns_of(row) for place in turn}
    return replace(row, loss_mask=[float(i in sampled) for i in range(len(row.tokens))])


def cut(row: TrainRow, end: int, sampled: range) -> TrainRow:
    lists: dict[str, Any] = {
        name: getattr(row, name)[:end]
        for name in ("tokens", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    return replace(row, loss_mask=[float(i in sampled) for i in range(end)], **lists)


def whole() -> TrainBatch:
    return train_batch([one_row(row) for row in make_rows(LENGTHS)])


def branched() -> TrainBatch:
    """Each turn in a branch of its own, whose context is the same as in `whole`. The second episode
    has one branch."""
    rows, sequences = list[TrainRow](), [0]
    for n, row in enumerate(make_rows(LENGTHS)):
        if n == 1:
            rows.append(one_row(row))
        else:
            rows += [cut(row, turn.stop, turn) for turn in turns_of(row)]
        sequences.append(len(rows))
    return replace(train_batch(rows), sequences=sequences)


@pytest.mark.parametrize("agg_mode", list(LossAggMode))
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "geo_mean"])
def test_gradients_equal_those_of_one_row(loss_mode: str, agg_mode: LossAggMode) -> None:
    loss = policy_loss_fn(
        loss_mode=loss_mode,
        loss_agg_mode=agg_mode,
        config=PolicyLossConfig(loss_scale_factor=40.0),
        entropy_coeff=0.01,
        use_kl_loss=True,
    )
    expected, found = tiny_backend(), tiny_backend(max_tokens_per_micro_batch=70)
    metrics = expected.forward_backward(whole(), loss).wait()
    assert found.forward_backward(branched(), loss).wait() == pytest.approx(metrics, rel=1e-4)
    assert relative_difference(gradients(found), gradients(expected)) < 2e-5


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus", "rloo"])
def test_advantages_equal_those_of_one_row(estimator: str) -> None:
    found = []
    for batch in (whole(), branched()):
        rewards = torch.zeros(batch.num_tokens)
        rewards[[end - 1 for end in batch.sequence_starts[1:]]] = torch.tensor([1.0, 0.0, 2.0])
        first = batch.sequence_starts[0] + turns_of(make_rows(LENGTHS)[0])[0].stop - 1
        rewards[first] = -0.5
        place = torch.cat([torch.arange(n) for n in batch.lengths])
        values = torch.where(batch.targets, place * 0.01, 0.0)
        if estimator == "gae":
            batch.values = values
        fill_advantages(
            batch,
            rewards,
            ["a", "a", "a"],
            adv_estimator=estimator,
            config=AdvantageConfig(gamma=0.9, lam=0.8),
        )
        assert batch.advantages is not None
        found.append(batch.advantages[batch.targets])
    assert len(found[0]) == whole().num_target_tokens
    torch.testing.assert_close(found[1], found[0])
    assert len(set(found[0].tolist())) > 2


def test_selected_rows_keep_their_sequences() -> None:
    batch = branched()
    assert batch.sequences == [0, 2, 3, 5]
    assert select_rows(batch, [3, 4, 2]).sequences == [0, 2, 3]
    assert select_rows(batch, [0, 1, 0, 1, 2]).sequences == [0, 2, 4, 5]
    assert select_rows(batch, range(5)).sequences == [0, 2, 3, 5]


def test_a_layout_puts_the_rows_of_a_sequence_into_one() -> None:
    layout = SequenceLayout.of([7, 3, 7], [2, 1, 3], 4)
    values = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]])
    assert layout.apply(values).tolist() == [[1, 2, 4, 5, 6], [3, 0, 0, 0, 0]]


def test_sequences_stay_together_in_a_plan() -> None:
    lengths = {0: 10, 1: 20, 2: 10, 3: 10, 4: 12}
    sequences = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}
    plan = plan_sequences(lengths, sequences, max_tokens=34, padded=False)
    assert plan == [[2, 3, 4], [0, 1]]
    assert plan_sequences(lengths, sequences, max_tokens=None, max_rows=2) == [[2], [3, 4], [0, 1]]
    # Padded to 16 and 32 tokens.
    assert plan_sequences(lengths, sequences, max_tokens=64) == [[2, 3, 4], [0, 1]]


def test_a_sequence_beyond_the_budget_is_refused_with_remedies() -> None:
    with pytest.raises(DataError, match=r"rows 0 to 1\) need 30 tokens") as error:
        plan_sequences({0: 10, 1: 20}, {0: 0, 1: 0}, max_tokens=29, padded=False)
    assert "ppo_max_token_len_per_gpu" in str(error.value)
    assert "multi_turn.history=append" in str(error.value)


SEQUENCES = policy_loss_fn(loss_mode="gspo", loss_agg_mode=LossAggMode.SEQ_MEAN_TOKEN_MEAN)


def updated(backend: SingleProcessBackend) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = backend.forward_backward(branched(), SEQUENCES).wait()
    metrics |= backend.optim_step().wait()
    return metrics, weights(backend)


def on_rank(ranks: Ranks) -> Any:
    return updated(ShardedBackend(tiny_decoder(), ranks, **SETTINGS))


SETTINGS: dict[str, Any] = {"max_tokens_per_micro_batch": 70, "optim": OptimSettings(lr=1e-2)}


def test_processes_share_whole_sequences() -> None:
    metrics, expected = updated(tiny_backend(**SETTINGS))
    for own, found in on_ranks(2, on_rank):
        assert own == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert relative_difference(found, expected) < 1e-5
