"""Blocks of keys and values: memory, sharing, and engines whose blocks are in any order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.inference.engine.kv_blocks import BLOCK_SLOTS, BlockStore
from slipstream.inference.engine.kv_rows import KVPrefix
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import (
    all_bits,
    make_engine,
    make_request,
    random_prompt,
    shared_decoder,
)

CONFIG = shared_decoder().config


def make_store(budget: int = 1 << 30, block: int = 32) -> BlockStore:
    return BlockStore(CONFIG, torch.float32, budget, block=block)


def used(store: BlockStore) -> int:
    """Return the bytes of the blocks that rows use."""
    return store.nbytes - len(store._free) * store._block_bytes


def contents(prefix: KVPrefix) -> Tensor:
    return torch.cat(prefix.parts, 3)


def fill(store: BlockStore, row: int, length: int) -> Tensor:
    """Write random keys and values to the first slots of a row, and return a copy of them."""
    parts = store.view_prefix(row, length).parts
    generator = torch.Generator().manual_seed(row)
    for part in parts:
        part.normal_(generator=generator)
    return torch.cat(parts, 3)


def test_each_row_takes_the_blocks_of_its_own_length() -> None:
    store = make_store()
    store.reserve([33, 1, 300])
    block_bytes = 32 * store.slot_bytes
    assert used(store) == store.nbytes == (2 + 1 + 10) * block_bytes
    stored = [fill(store, row, length) for row, length in enumerate((33, 1, 300))]
    store.reserve([65, 1, 320])
    assert used(store) == (3 + 1 + 10) * block_bytes
    for row, length in enumerate((33, 1, 300)):
        assert torch.equal(contents(store.view_prefix(row, length)), stored[row])


def test_the_last_row_takes_the_place_of_an_ended_one_and_blocks_are_reused() -> None:
    store = make_store()
    store.reserve([40, 70, 100])
    last = fill(store, 2, 100)
    allocated = store.nbytes
    store.end(0, 2, 99)
    assert torch.equal(contents(store.view_prefix(0, 100)), last)
    assert used(store) == (3 + 4) * 32 * store.slot_bytes
    store.reserve([100, 70, 64])
    assert store.nbytes == allocated
    for row in (2, 1, 0):
        store.end(row, row, 0)
    assert used(store) == 0
    store.release()
    assert store.nbytes == 0


def test_rows_share_the_whole_blocks_of_a_prompt() -> None:
    store = make_store()
    store.reserve([80, 80])
    prompt = fill(store, 0, 80)
    store.share(0, 1, 80)
    assert used(store) == 4 * 32 * store.slot_bytes
    assert torch.equal(contents(store.view_prefix(1, 80)), prompt)
    # The last block is the row's own, and the others outlive the row that wrote them.
    store.view_prefix(0, 80).parts[2].zero_()
    store.end(0, 1, 80)
    assert torch.equal(contents(store.view_prefix(0, 80)), prompt)
    store.end(0, 0, 0)
    assert used(store) == 0


def test_a_row_with_nan_is_zero_when_its_blocks_are_used_again() -> None:
    store = make_store()
    store.reserve([40, 40])
    store.share(0, 1, 40)
    for part in store.view_prefix(0, 40).parts:
        part.fill_(float("nan"))
    store.clear(0)
    store.end(0, 1, 40)
    # The first block still belongs to the other row.
    assert store.view_prefix(0, 40).parts[0].isnan().all()
    store.reserve([40, 40])
    assert not contents(store.view_prefix(1, 40)).isnan().any()
    store.end(0, 1, 40)
    store.end(0, 0, 0)
    free = store.nbytes // (32 * store.slot_bytes)
    store.reserve([32 * free])
    assert not contents(store.view_prefix(0, 32 * free)).isnan().any()


def test_the_budget_limits_blocks_and_not_rows_times_the_longest() -> None:
    block_bytes = 32 * make_store().slot_bytes
    grown: list[int] = []
    store = BlockStore(
        CONFIG, torch.float32, 12 * block_bytes, block=32, before_growth=grown.append
    )
    assert store.fits([256, 32, 32, 64])
    assert not store.fits([256, 32, 32, 65])
    store.reserve([256, 32])
    assert grown == [store.nbytes] == [9 * block_bytes]
    assert store.fits([256, 32, 96])
    assert not store.fits([257, 32, 96])
    store.end(0, 1, 31)
    assert store.fits([32, 11 * 32])


def test_blocks_of_rejected_drafts_are_free_for_other_rows() -> None:
    block_bytes = 32 * make_store().slot_bytes
    store = make_store(budget=4 * block_bytes)
    store.reserve([30, 31])
    assert store.fits([34, 35])
    store.reserve([34, 35])
    # The drafts of both rows were rejected, and a third row starts.
    assert store.fits([31, 32, 64])
    stored = fill(store, 0, 32)
    store.reserve([31, 32, 64])
    assert store.nbytes == used(store) == 4 * block_bytes
    assert torch.equal(contents(store.view_prefix(0, 32)), stored)
    assert not store.fits([33, 32, 64])


def test_drafts_preempt_no_request() -> None:
    # The budget holds both requests to their ends, and no drafts beyond.
    block_bytes = BLOCK_SLOTS * make_store().slot_bytes
    head = DraftHead(CONFIG)
    head.init_weights(1)
    engine = make_engine(
        kv_budget_bytes=4 * block_bytes,
        proposer=EagleProposer(head, dtype=torch.float32),
        plan=DraftPlan.chain(6),
        max_model_len=128,
    )
    requests = [
        make_request(str(i), [3 + i] * (40 + 9 * i), max_tokens=80 - 9 * i, ignore_eos=True)
        for i in range(2)
    ]
    assert all_bits(engine.run(requests)) == all_bits(make_engine().run(requests))
    assert engine.stats().draft_tokens > 0
    assert engine.stats().preempted == 0


def test_a_prefix_of_several_blocks_is_cut_at_any_length() -> None:
    store = make_store()
    store.reserve([300])
    stored = fill(store, 0, 300)
    for length in (31, 32, 33, 96, 200):
        cut = store.view_prefix(0, 300).first(length)
        aligned = -(-length // 32) * 32
        assert torch.equal(contents(cut), stored[:, :, :, :aligned])
        assert cut.nbytes == aligned * store.slot_bytes
    store.reserve([300, 200])
    store.restore(1, store.view_prefix(0, 300).first(200).clone())
    assert torch.equal(contents(store.view_prefix(1, 200)), stored[:, :, :, :224])


def test_rows_that_have_nothing_yet_end_in_any_order() -> None:
    store = make_store()
    store.reserve([40, 70])
    first, second = fill(store, 0, 40), fill(store, 1, 70)
    # Rows 2 and 3 were never reserved.
    store.end(3, 3, 0)
    store.end(1, 2, 0)
    assert torch.equal(contents(store.view_prefix(0, 40)), first)
    assert used(store) == 2 * 32 * store.slot_bytes
    store.reserve([40, 70])
    assert second.shape == fill(store, 1, 70).shape


def shuffled(store: BlockStore, seed: int) -> None:
    """Allocate blocks, and put them into the list of free blocks in random order."""
    store.reserve([64 * BLOCK_SLOTS])
    store.end(0, 0, 0)
    random.Random(seed).shuffle(store._free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", ["off", "4_1_5", "3_2_6"])
def test_engines_with_shuffled_blocks_have_the_bits_of_plain_ones(
    dtype: torch.dtype, plan: str
) -> None:
    # Contexts end before, at and after the ends of blocks. Three prompts have three samples each.
    prompts = [random_prompt(random.Random(i), length) for i, length in enumerate((50, 64, 100))]
    ends = (127, 128, 129, 191, 192, 193, 255, 256, 257)
    requests = [
        make_request(str(i), prompts[i % 3], max_tokens=end - len(prompts[i % 3]), ignore_eos=True)
        for i, end in enumerate(ends)
    ]
    head = DraftHead(CONFIG)
    head.init_weights(1)
    proposer = EagleProposer(head, dtype=dtype, free_cache=False)
    engine = make_engine(
        dtype=dtype,
        free_cache_engine=False,
        proposer=None if plan == "off" else proposer,
        plan=OFF if plan == "off" else DraftPlan.parse(plan),
    )
    store = engine._scheduler.store
    assert isinstance(store, BlockStore)
    with torch.inference_mode():
        shuffled(store, 1)
        if plan != "off":
            assert isinstance(proposer._store, BlockStore)
            shuffled(proposer._store, 2)
    for request in requests:
        engine.add(request)
    done = engine.step()
    # Two of the prompts have whole blocks: one each.
    assert sorted(store._uses.values())[-2:] == [3, 3]
    while engine.has_work():
        done += engine.step()
    by_name = {g.request_id: g for g in done}
    found = [by_name[request.request_id] for request in requests]
    assert all_bits(found) == all_bits(make_engine(dtype=dtype).run(requests))
    assert used(store) == 0


def test_a_long_response_among_short_ones_takes_no_memory_for_them() -> None:
    lengths = [40] * 31 + [900]
    engine = make_engine(max_model_len=1024, free_cache_engine=False, max_num_seqs=32)
    engine.run(
        [
            make_request(str(i), [3 + i % 40, 4], max_tokens=n, ignore_eos=True)
            for i, n in enumerate(lengths)
        ]
    )
    store = engine._scheduler.store
    needed = sum(-(-(n + 2) // BLOCK_SLOTS) * BLOCK_SLOTS for n in lengths) * store.slot_bytes
    assert store.nbytes <= 1.1 * needed
