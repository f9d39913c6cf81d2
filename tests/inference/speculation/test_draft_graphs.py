"""Tests of captured drafting (CUDA graphs), with a stand-in for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.inference.engine.graph_shapes import OFTEN
from slipstream.inference.speculation.batched_trees import draft_tree_batched
from slipstream.inference.speculation.draft_graphs import (
    DraftGraphs,
    Drafting,
    DraftInputs,
    PrefillInput,
    most_new_tokens,
)
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.models.decoder import PackedDecoder
from slipstream.models.draft.eagle1 import DraftHead, PackedDraftHead
from slipstream.sampling.choose import SamplingRows
from tests.inference.helpers import make_decoder
from tests.inference.stand_in import MIB, trace

pytestmark = pytest.mark.usefixtures("without_kernels", "whole_chunks")

PLAN = DraftPlan(3, 2, 4)


def models(seed: int = 0) -> tuple[PackedDecoder, PackedDraftHead]:
    decoder = make_decoder(seed)
    head = DraftHead(decoder.config)
    head.init_weights(1)
    with torch.no_grad():
        packed = head.pack(torch.float32)
        return decoder.pack(torch.float32), packed


def drafting(head: PackedDraftHead, kv: Tensor) -> Drafting:
    """Drafts trees of three levels that expand two nodes each: four slots in all. In place of a
    prefill, the state at the last feature is the feature plus a small number from the token."""

    def draft(batch: DraftBatch, prefill: PrefillInput, num_keys: int) -> tuple[Tensor, ...]:
        starts, counts = prefill.numbers[:, 0], prefill.numbers[:, 1]
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, 32)
        hidden = prefill.features.gather(1, last)[:, 0] + prefill.numbers[:, 2:3] / 64
        given = DraftInputs(starts + counts, hidden, prefill.scale)
        return draft_tree_batched(
            head, batch.policy.lm_head, kv, batch, given, num_keys, PLAN.steps, PLAN.topk
        )

    return draft


def batch_of(policy: PackedDecoder, count: int, step: int) -> DraftBatch:
    rows = SamplingRows.of(
        [(i, step) for i in range(count)],
        temperatures=[0.0, *[0.5 + 0.1 * i for i in range(1, count)]],
        top_ks=[0] * count,
        top_ps=[1.0] * count,
        min_ps=[0.0] * count,
        device=torch.device("cpu"),
    )
    return DraftBatch(
        request_ids=[str(i) for i in range(count)],
        last=[0] * count,
        positions_N=torch.arange(count) + 10 * step,
        rows=rows,
        policy=policy,
        # Positive, so that an uncaptured draft compares scores, but too small to end drafting
        # early.
        min_acceptance=1e-9,
    )


def inputs(count: int, step: int) -> PrefillInput:
    """A prefill of up to as many tokens per request as a step of the plan can yield."""
    generator = torch.Generator().manual_seed(step)
    width = 1 + step % most_new_tokens(PLAN)
    features = torch.randn(count, width, 32, generator=generator)
    starts = torch.randint(1, 36, (count, 1), generator=generator)
    counts = torch.randint(1, width + 1, (count, 1), generator=generator)
    ids = torch.randint(0, 64, (count, width), generator=generator)
    scale = torch.tensor(1.0 + step, dtype=torch.float64)
    return PrefillInput(torch.cat([starts, counts, ids], 1), features, scale)


def cache() -> Tensor:
    return torch.randn(2, 8, 2, 128, 16, generator=torch.Generator().manual_seed(9))


def drafted(
    graphs: DraftGraphs, policy: PackedDecoder, head: PackedDraftHead, kv: Tensor, step: int
) -> None:
    """Draft for five requests, and compare with drafts without graphs."""
    given, batch = inputs(5, step), batch_of(policy, 5, step)
    num_keys = int(given.numbers[:, 0].max()) + given.width + 4
    expected = drafting(head, kv.clone())(batch, given, num_keys)
    found = graphs.draft(drafting(head, kv), batch, PLAN, given, kv, num_keys)
    tokens, parents, scores, gaps = found
    assert tokens.shape == (5, 2 + 2 * 4)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(parents, expected[1])
    # Padding may change the order in which torch sums.
    torch.testing.assert_close(scores, expected[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gaps, expected[3], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_captured_drafts_equal_uncaptured_ones() -> None:
    (policy, head), kv = models(), cache()
    graphs = DraftGraphs(trace)
    for step in range(OFTEN + 5):
        drafted(graphs, policy, head, kv, step)
    assert graphs.replayed == 6
    assert graphs.memory.nbytes == MIB
    assert graphs.memory.sentence().startswith("1 draft graph uses 1.0 MiB: 1.0 MiB for 4 tokens")


@torch.no_grad()
def test_graphs_are_dropped_if_weights_or_cache_move() -> None:
    (policy, head), kv = models(), cache()
    graphs = DraftGraphs(trace)
    for step in range(2 * OFTEN):
        drafted(graphs, policy, head, kv, step)
    before = graphs.replayed
    other, head = models(seed=3)
    graphs.clear()
    assert graphs.memory.nbytes == 0
    kv = cache()
    # Half of the counts of a shape is kept, so it is captured again soon.
    for step in range(3):
        drafted(graphs, other, head, kv, step)
    assert graphs.replayed > before
    # Another cache without a call of `clear`.
    kv = torch.cat([cache(), cache()], 3)
    drafted(graphs, other, head, kv, 0)
    assert graphs.memory.nbytes <= MIB


@torch.no_grad()
def test_a_frequent_plan_gets_its_own_graph() -> None:
    (policy, head), kv = models(), cache()
    graphs = DraftGraphs(trace)

    def draft(plan: DraftPlan) -> None:
        graphs.draft(drafting(head, kv), batch_of(policy, 4, 0), plan, inputs(4, 0), kv, 42)

    for _ in range(100):
        draft(PLAN)
    for _ in range(4):
        draft(DraftPlan(3, 2, 8))
    assert graphs.memory.nbytes == MIB
    for _ in range(20):
        draft(DraftPlan(3, 2, 8))
    assert graphs.memory.nbytes == 2 * MIB
