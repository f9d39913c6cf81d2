"""The KV store: growth of rows and slots, in new memory and in place, and moves of slots."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import all_bits, make_engine, make_request, shared_decoder

CONFIG = shared_decoder().config


def make_store(budget: int = 1 << 30, row_multiple: int = 1) -> KVStore:
    cpu = torch.device("cpu")
    return KVStore(CONFIG, torch.float32, cpu, budget, row_multiple=row_multiple)


def fill(store: KVStore, rows: int, length: int) -> Tensor:
    """Write random keys and values to the first slots, and return a copy of them."""
    block = store.data[:, :, :rows, :, :length]
    block.copy_(torch.randn(block.shape, generator=torch.Generator().manual_seed(0)))
    return block.clone()


def test_growth_in_new_memory_keeps_the_contents_and_is_zero_elsewhere() -> None:
    store = make_store()
    store.reserve([60] * 2)
    assert (store.rows, store.slots) == (2, 64)
    stored = fill(store, 2, 60)
    store.reserve([65] * 3)
    assert (store.rows, store.slots) == (4, 128)
    assert torch.equal(store.data[:, :, :2, :, :60], stored)
    assert store.data[:, :, 2:].abs().sum() == store.data[..., 64:, :].abs().sum() == 0
    assert store.nbytes == 4 * 128 * store.slot_bytes


@pytest.mark.parametrize("row_multiple", [1, 4])
def test_growth_in_place_keeps_the_contents(row_multiple: int) -> None:
    store = make_store(row_multiple=row_multiple)
    store.reserve([250] * 16)
    memory = store.data.data_ptr(), store.nbytes
    rng = random.Random(1)
    for rows, length in ((16, 256), (8, 300), (3, 700), (1, 900), (13, 40), (16, 200), (2, 1000)):
        kept = rng.randrange(1, min(store.rows, rows) + 1), rng.randrange(1, min(length, 256) + 1)
        kept = kept[0], min(kept[1], store.slots)
        stored = fill(store, *kept)
        store.reserve([length] * rows)
        assert store.rows >= rows
        assert store.rows % row_multiple == 0
        assert store.slots >= length
        assert (store.data.data_ptr(), store.nbytes) == memory
        assert torch.equal(store.data[:, :, : kept[0], :, : kept[1]], stored)
    # More than the allocated memory holds.
    stored = fill(store, 2, 1000)
    store.reserve([store.nbytes // store.slot_bytes] * 2)
    assert store.nbytes > memory[1]
    assert torch.equal(store.data[:, :, :2, :, :1000], stored)
    store.release()
    assert store.nbytes == store.rows == store.slots == 0


def test_near_the_budget_only_the_needed_memory_is_allocated() -> None:
    store = make_store()
    store.budget = 3 * 128 * store.slot_bytes
    store.reserve([64] * 2)
    store.reserve([65] * 3)
    assert (store.rows, store.slots) == (3, 128)
    assert store.nbytes == store.budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_memory_with_old_contents_gives_the_same_bits(
    dtype: torch.dtype,
) -> None:
    head = DraftHead(CONFIG)
    head.init_weights(1)
    proposer = EagleProposer(head, dtype=dtype, free_cache=False)
    kept = make_engine(
        dtype=dtype, free_cache_engine=False, proposer=proposer, plan=DraftPlan.chain(2)
    )
    rng, most = random.Random(2), 0
    for number in range(6):
        lengths = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 12))]
        requests = [
            make_request(f"{number}/{i}", [3 + i, 4, 5], max_tokens=n, ignore_eos=True)
            for i, n in enumerate(lengths)
        ]
        assert all_bits(kept.run(requests)) == all_bits(make_engine(dtype=dtype).run(requests))
        assert kept.stats().kv_bytes >= most
        most = kept.stats().kv_bytes
    assert most > 0


@pytest.mark.usefixtures("without_kernels")
def test_torch_moves_slots_within_their_rows() -> None:
    store = make_store()
    store.reserve([40] * 3)
    fill(store, 3, 40)
    before = store.data.clone()
    moves = [(0, 7, 5), (2, 9, 6), (2, 12, 7)]
    store.move_slots(moves)
    for row, source, target in moves:
        assert torch.equal(store.data[:, :, row, :, target], before[:, :, row, :, source])
        before[:, :, row, :, target] = store.data[:, :, row, :, target]
    assert torch.equal(store.data, before)
