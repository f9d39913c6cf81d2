"""The KV budget, the free memory of control groups, and memory after many requests."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import anyio
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.engine.memory import _group_limits, free_bytes, kv_budget
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.metrics.resident import resident_bytes
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import decode, make_request, random_prompt, shared_decoder

CPU = torch.device("cpu")
SLOT_BYTES = 2 * 2 * 2 * 16 * 4


def budget(wanted: int | None = None, share: float = 0.5, length: int = 100) -> int:
    config = shared_decoder().config
    return kv_budget(config, torch.float32, CPU, max_model_len=length, wanted=wanted, share=share)


def test_an_explicit_budget_is_used() -> None:
    assert budget(4 * 128 * SLOT_BYTES) == 4 * 128 * SLOT_BYTES


def test_the_default_budget_is_a_share_of_the_free_memory() -> None:
    free = free_bytes(CPU)
    assert free > 1 << 20
    # The free memory can change between the two calls.
    assert 0.2 * free < budget(share=0.25) < 0.3 * free


def test_a_budget_too_small_for_one_sequence_is_refused() -> None:
    needed = 128 * SLOT_BYTES
    with pytest.raises(
        ConfigError,
        match=rf"kv_cache_bytes={needed - 1} is too small: .* 100 tokens need {needed} bytes; "
        r"raise it, lower data\.max_prompt_length or data\.max_response_length",
    ):
        budget(needed - 1)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=1e-09 of \d+ free bytes is too small"
    ):
        budget(share=1e-9)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_control_groups_and_their_parents_are_found(tmp_path: Path) -> None:
    listing, root = tmp_path / "cgroup", tmp_path / "fs"
    listing.write_text("0::/outer/inner\n")
    stat = "anon 5\ninactive_file 30\n"
    write(root / "outer", memory__max="900\n", memory__current="400\n", memory__stat=stat)
    write(root / "outer/inner", memory__max="max\n", memory__current="70\n", memory__stat=stat)
    assert _group_limits(listing, root) == [900 - 400 + 30]
    (root / "outer/inner/memory.max").write_text("60\n")
    assert sorted(_group_limits(listing, root)) == [60 - 70 + 30, 530]
    # Version 1 of control groups.
    listing.write_text("5:cpu:/x\n4:memory,hugetlb:/job\n")
    write(
        root / "memory/job",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="990\n",
        memory__stat="total_inactive_file 0\n",
    )
    assert _group_limits(listing, root) == [10]
    assert _group_limits(tmp_path / "none", root) == []


def test_many_requests_leak_no_memory() -> None:
    decoder, rng = shared_decoder(), random.Random(0)
    head = DraftHead(decoder.config)
    head.init_weights(1)
    proposer = EagleProposer(head, dtype=torch.float32)
    settings = EngineSettings(
        max_model_len=96,
        dtype=torch.float32,
        max_num_seqs=64,
        max_prefill_tokens=256,
        prefix_caching=True,
        kv_budget_bytes=160 * 64 * SLOT_BYTES,
    )
    engine = EmbeddedEngine(
        decoder, settings, decode=decode, proposer=proposer, plan=DraftPlan.chain(1)
    )

    async def serve(count: int, start: int) -> None:
        async with anyio.create_task_group() as tasks:
            for i in range(start, start + count):
                prompt = random_prompt(rng, rng.randrange(3, 30))
                tasks.start_soon(engine.generate, make_request(f"r{i}", prompt, max_tokens=4))

    async def run() -> list[tuple[int, int]]:
        seen = []
        for round_ in range(10):
            await serve(200, 200 * round_)
            gc.collect()
            seen.append((resident_bytes(), len(gc.get_objects())))
        return seen

    seen = anyio.run(run)
    stats = engine.stats()
    engine.close()
    assert stats.finished == 2000
    assert 0 < stats.kv_bytes <= settings.kv_budget_bytes
    (bytes_before, objects_before), (bytes_after, objects_after) = seen[2], seen[-1]
    assert bytes_after < 1.05 * bytes_before
    # Less than one object per 4 of the 1,400 requests in between.
    assert objects_after - objects_before < 350
