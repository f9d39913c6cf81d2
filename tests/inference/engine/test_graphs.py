"""Recorded decode steps give what computing them gives.

CUDA graphs need a GPU. On a CPU, torch's tracer records a step as they do: its operations with the
addresses and shapes that they had, and nothing of the Python around them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.bench.drafters import LyingOracle
from slipstream.inference.engine import Engine
from slipstream.inference.engine.graphs import DecodeGraphs, bucket_of_keys, bucket_of_rows
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.types import GenerateRequest
from tests.inference.helpers import (
    VOCAB,
    all_bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    update_from,
)

pytestmark = pytest.mark.usefixtures("without_kernels")


def trace(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """A `Recorder`."""
    recorded = make_fx(compute)()
    result = compute()
    return result, lambda: result.copy_(recorded())


def recording(engine: Engine) -> DecodeGraphs:
    """Let an engine on a CPU record; as on a GPU, its rows come in eights."""
    graphs = DecodeGraphs(trace)
    engine._runner.graphs = graphs
    engine._scheduler.store._row_multiple = engine._runner.row_multiple
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
    # All but the first ones of a shape, and those after the store has grown.
    assert 0.6 * steps < graphs.replayed < steps


def test_with_drafts_too() -> None:
    eager = make_engine(dtype=torch.bfloat16)
    expected = eager.run(requests())
    known = {g.request_id: g.token_ids for g in expected}
    recorded = make_engine(
        dtype=torch.bfloat16,
        proposer=LyingOracle(known, vocab_size=VOCAB, lies=0.3),
        plan=DraftPlan.chain(3),
    )
    graphs = recording(recorded)
    assert all_bits(recorded.run(requests())) == all_bits(expected)
    assert recorded.stats().accepted_tokens > 100
    assert graphs.replayed > 10


def test_recordings_end_with_the_weights_that_they_were_made_for() -> None:
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


def test_an_idle_engine_holds_no_memory_of_recordings() -> None:
    engine = make_engine(dtype=torch.bfloat16)
    graphs = recording(engine)
    engine.add(make_request("a", max_tokens=30))
    for _ in range(10):
        engine.step()
    kept = weakref.ref(engine._scheduler.store.data)
    assert graphs.replayed > 0
    assert kept() is not None
    drain(engine)
    gc.collect()
    assert kept() is None


def test_buckets_waste_at_most_half() -> None:
    assert [bucket_of_rows(n) for n in (1, 2, 3, 5, 8, 9, 33)] == [1, 2, 4, 8, 8, 16, 40]
    cpu = torch.device("cpu")
    lengths = 1, 512, 513, 1025, 2000, 2049, 3000, 4000
    found = [bucket_of_keys(n, torch.bfloat16, cpu) // 512 for n in lengths]
    assert found == [1, 1, 2, 3, 4, 6, 6, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_write_what_eager_steps_write() -> None:
    decoder = make_decoder().cuda()
    eager = make_engine(decoder, torch.bfloat16, enforce_eager=True)
    recorded = make_engine(decoder, torch.bfloat16)
    assert eager._runner.graphs is None
    expected, got = eager.run(requests()), recorded.run(requests())
    graphs = recorded._runner.graphs
    assert graphs is not None
    assert graphs.replayed > 0
    # Other shapes may take other kernels: close, and seldom another token.
    same = sum(a.token_ids == b.token_ids for a, b in zip(expected, got, strict=True))
    assert same >= 8


def test_taps_are_recorded_beside_the_final_states() -> None:
    decoder, taps = make_decoder(num_layers=3), (0, 2)
    asked = [
        make_request(str(i), [5 + i, 9], max_tokens=20, ignore_eos=True, hidden=True)
        for i in range(3)
    ]
    eager = make_engine(decoder, dtype=torch.bfloat16, taps=taps)
    recorded = make_engine(decoder, dtype=torch.bfloat16, taps=taps)
    graphs = DecodeGraphs(trace, taps)
    recorded._runner.graphs = graphs
    recorded._scheduler.store._row_multiple = recorded._runner.row_multiple
    for ours, theirs in zip(recorded.run(asked), eager.run(asked), strict=True):
        assert ours.hidden_states is not None
        assert theirs.hidden_states is not None
        assert ours.hidden_states.shape == (20, 3 * 32)
        assert torch.equal(ours.hidden_states, theirs.hidden_states)
    assert graphs.replayed > 5
