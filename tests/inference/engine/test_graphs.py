"""Recorded decode steps give the same bits as eager ones.

CUDA graphs need a GPU. On a CPU, `tests.inference.stand_in` replaces them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slipstream.bench.speculation.drafters import LyingOracle
from slipstream.inference.engine import Engine
from slipstream.inference.engine.graph_shapes import Choices
from slipstream.inference.engine.graphs import DecodeGraphs
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.verification import make_verification
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftTree
from slipstream.types import GenerateRequest, Generation
from tests.inference.helpers import (
    VOCAB,
    all_bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    update_from,
)
from tests.inference.stand_in import trace

pytestmark = pytest.mark.usefixtures("without_kernels", "whole_chunks")


def recording(
    engine: Engine, aux_layers: tuple[int, ...] = (), choices: Choices | None = None
) -> DecodeGraphs:
    """Let an engine on a CPU record decode steps. As on a GPU, its rows are a multiple of 8."""
    graphs = DecodeGraphs(trace, aux_layers, choices)
    engine._runner.graphs = graphs
    store = engine._scheduler.store
    assert isinstance(store, KVStore)
    store._row_multiple = engine._runner.row_multiple
    return graphs


def requests(count: int = 11) -> list[GenerateRequest]:
    return [
        make_request(str(i), [5 + i, 9, 3 + i % 2], max_tokens=20 + 9 * i) for i in range(count)
    ]


def test_recorded_steps_give_the_same_bits() -> None:
    eager, recorded = make_engine(dtype=torch.bfloat16), make_engine(dtype=torch.bfloat16)
    graphs = recording(recorded)
    assert all_bits(recorded.run(requests())) == all_bits(eager.run(requests()))
    steps = recorded.stats().decode_steps
    # All steps but the first ones of each shape, and those after the store has grown.
    assert 0.6 * steps < graphs.replayed < steps


def test_recorded_steps_with_chains_give_the_same_bits() -> None:
    eager = make_engine(dtype=torch.bfloat16)
    expected = eager.run(requests())
    known = {g.request_id: g.token_ids for g in expected}
    recorded = make_engine(
        dtype=torch.bfloat16,
        proposer=LyingOracle(known, vocab_size=VOCAB, lies=0.3),
        plan=DraftPlan.chain(3),
    )
    graphs = recording(recorded, choices=lambda running: [DraftPlan.chain(3)])
    assert all_bits(recorded.run(requests())) == all_bits(expected)
    assert recorded.stats().accepted_tokens > 100
    assert graphs.replayed > 10


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend as on a GPU: to the slots on each row's path, with sums in no fixed order."""
    monkeypatch.setattr("slipstream.models.attention.sums_in_key_order", lambda device: False)


def drafting(
    known: Sequence[Generation], plan: DraftPlan, *, ragged: bool = False, **settings: Any
) -> Engine:
    """An engine with a proposer whose drafts are accepted in about 70 % of cases."""
    responses = {g.request_id: g.token_ids for g in known}
    oracle = LyingOracle(responses, vocab_size=VOCAB, lies=0.3, ragged=ragged)
    return make_engine(proposer=oracle, plan=plan, **settings)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_with_trees_give_the_same_bits(dtype: torch.dtype) -> None:
    plain = make_engine(dtype=dtype).run(requests())
    eager = drafting(plain, DraftPlan(4, 3, 8), dtype=dtype)
    recorded = drafting(plain, DraftPlan(4, 3, 8), dtype=dtype)
    graphs = recording(recorded)
    steps = replayed = 0
    for _ in range(3):
        expected, got = eager.run(requests()), recorded.run(requests())
        assert all_bits(got) == all_bits(expected)
        assert [g.token_ids for g in got] == [g.token_ids for g in plain]
        before, steps = steps, recorded.stats().decode_steps
        share, replayed = (graphs.replayed - replayed) / (steps - before), graphs.replayed
    # Shapes of earlier rollouts are recorded at their first use.
    assert share > 0.7
    assert recorded.stats().sibling_tokens > 50


@pytest.mark.usefixtures("as_on_a_gpu")
def test_padding_to_recorded_shapes_does_not_change_tokens() -> None:
    plain = make_engine(dtype=torch.bfloat16).run(requests())
    plan = DraftPlan(5, 3, 7)
    recorded = drafting(plain, plan, dtype=torch.bfloat16, ragged=True)
    graphs = recording(recorded, choices=lambda running: [plan, DraftPlan(8, 4, 32)])
    assert [g.token_ids for g in recorded.run(requests())] == [g.token_ids for g in plain]
    assert graphs.replayed > 10
    chains = drafting(plain, DraftPlan.chain(4), dtype=torch.bfloat16, ragged=True)
    graphs = recording(chains, choices=lambda running: [DraftPlan.chain(7)])
    assert all_bits(chains.run(requests())) == all_bits(plain)
    assert graphs.replayed > 10


def test_padding_rows_stay_within_the_store() -> None:
    engine = make_engine(dtype=torch.bfloat16)
    graphs = recording(engine, choices=lambda running: [DraftPlan.chain(31)])
    store, packed = engine._scheduler.store, engine._runner.packed
    assert isinstance(store, KVStore)
    store.reserve([100])
    tree, cpu = DraftTree.chain(5, [6, 7]), torch.device("cpu")

    def recorded(length: int) -> list[bool]:
        step = make_verification([tree], [length], cpu, row_by_row=False, multiple=4)
        with torch.inference_mode():
            return [graphs.decode(packed, store, step) is not None for _ in range(4)]

    # 29 padding rows follow the last known token and two drafts.
    assert recorded(store.slots - 30) == [False] * 4
    assert recorded(store.slots - 31) == [False, False, True, True]


def test_recordings_use_new_weights_after_an_update() -> None:
    eager, recorded = (make_engine(make_decoder(), torch.bfloat16) for _ in range(2))
    graphs = recording(recorded)
    for engine in (eager, recorded):
        for request in requests():
            engine.add(request)
        for _ in range(30):
            engine.step()
        engine.update_weights(update_from(make_decoder(seed=1), version=1))
    before = graphs.replayed
    assert all_bits(drain(recorded)) == all_bits(drain(eager))
    assert graphs.replayed > before > 0


def test_recordings_of_an_idle_engine_do_not_keep_the_kv_store_alive() -> None:
    engine = make_engine(dtype=torch.bfloat16)
    graphs = recording(engine)
    engine.add(make_request("a", max_tokens=30))
    for _ in range(10):
        engine.step()
    store = engine._scheduler.store
    assert isinstance(store, KVStore)
    kept = weakref.ref(store.data)
    assert graphs.replayed > 0
    assert kept() is not None
    drain(engine)
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
def test_cuda_graphs_give_the_tokens_of_eager_steps() -> None:
    decoder = make_decoder().cuda()
    eager = make_engine(decoder, torch.bfloat16, enforce_eager=True)
    recorded = make_engine(decoder, torch.bfloat16)
    assert eager._runner.graphs is None
    expected, got = eager.run(requests()), recorded.run(requests())
    graphs = recorded._runner.graphs
    assert graphs is not None
    assert graphs.replayed > 0
    # Padded shapes may use other kernels, so a few tokens may differ.
    same = sum(a.token_ids == b.token_ids for a, b in zip(expected, got, strict=True))
    assert same >= 8


def test_recorded_steps_return_auxiliary_layers() -> None:
    decoder, aux_layers = make_decoder(num_layers=3), (0, 2)
    asked = [
        make_request(str(i), [5 + i, 9], max_tokens=20, ignore_eos=True, hidden=True)
        for i in range(3)
    ]
    eager = make_engine(decoder, dtype=torch.bfloat16, aux_layers=aux_layers)
    recorded = make_engine(decoder, dtype=torch.bfloat16, aux_layers=aux_layers)
    graphs = recording(recorded, aux_layers)
    for got, expected in zip(recorded.run(asked), eager.run(asked), strict=True):
        assert got.hidden_states is not None
        assert expected.hidden_states is not None
        assert got.hidden_states.shape == (20, 3 * 32)
        assert torch.equal(got.hidden_states, expected.hidden_states)
    assert graphs.replayed > 5
