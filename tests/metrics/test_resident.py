"""Return of freed memory to the system."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from slipstream.heap import heap_in_use
from slipstream.metrics.resident import (
    HEAP_FACTOR,
    FreedMemory,
    HeapPeak,
    resident_bytes,
    return_freed_memory,
    usable_bytes,
)


def test_freed_memory_is_returned_to_the_system_at_intervals() -> None:
    now = 10.0
    freed = FreedMemory(lambda: now, limit_bytes=0)
    pieces = [torch.zeros(1000) for _ in range(20_000)]
    last = pieces.pop()
    before = resident_bytes()
    pieces.clear()
    assert freed.give_back()
    # 80 MB were freed below a block that is still in use. The C library would keep them.
    assert resident_bytes() < before - 60e6
    assert float(last.sum()) == 0
    now += FreedMemory.EVERY_SECONDS / 2
    assert not freed.give_back()
    now += FreedMemory.EVERY_SECONDS
    assert freed.give_back()


def test_freed_memory_is_kept_below_the_limit() -> None:
    used = resident_bytes()
    peak = HeapPeak(in_use=lambda: None)
    assert not FreedMemory(limit_bytes=2 * used, peak=peak).give_back()
    assert FreedMemory(limit_bytes=used / 2, peak=peak).give_back()


def test_freed_memory_is_returned_when_the_process_has_more_than_it_needs() -> None:
    limit = 2 * resident_bytes()
    few, many = HeapPeak(in_use=lambda: 1), HeapPeak(in_use=lambda: limit)
    assert not FreedMemory(limit_bytes=limit, peak=many).give_back()
    freed = FreedMemory(limit_bytes=limit, peak=few)
    assert freed.give_back()
    # The memory that could not be returned counts as needed from now on.
    freed = FreedMemory(limit_bytes=limit, peak=few)
    blocks = [torch.zeros(1_000_000) for _ in range(5)]
    assert freed.give_back()
    del blocks
    assert not FreedMemory(limit_bytes=limit, peak=few).give_back()


def test_a_process_needs_a_multiple_of_what_a_step_adds() -> None:
    now, in_use, anonymous = 10.0, 500, 0
    peak = HeapPeak(lambda: now, lambda: in_use, lambda: anonymous)

    def limit() -> float:
        nonlocal anonymous
        before, anonymous = anonymous, 0
        while not peak.exceeded():
            anonymous += 1
        found, anonymous = anonymous - 1, before
        return found

    peak.note()
    in_use = 900
    peak.note()  # too soon
    in_use = 100
    assert limit() == 100 + HEAP_FACTOR * 400
    now, in_use = 20.0, 300
    peak.note()
    assert limit() == 300 + HEAP_FACTOR * 200  # the highest counts, not the last
    anonymous = 350
    peak.freed_memory_was_returned()
    assert limit() == 350 + HEAP_FACTOR * 200
    peak.forget()
    assert limit() == 350


def test_the_use_of_the_heap_follows_allocations() -> None:
    before = heap_in_use()
    assert before is not None
    small, large = torch.zeros(10_000_000), torch.zeros(50_000_000)
    after = heap_in_use()
    assert after is not None
    assert 240e6 <= after - before < 241e6
    del small, large
    end = heap_in_use()
    assert end is not None
    assert end - before < 1e6


def test_memory_of_unreachable_objects_is_returned() -> None:
    blocks: list[object] = [bytearray(60_000) for _ in range(2000)]
    blocks.append(blocks)  # Only the garbage collector can delete it.
    before = resident_bytes()
    del blocks
    assert resident_bytes() > before - 20e6
    return_freed_memory()
    assert resident_bytes() < before - 80e6


def test_control_groups_limit_the_usable_memory(tmp_path: Path) -> None:
    total, listing = psutil.virtual_memory().total, tmp_path / "cgroup"
    assert usable_bytes(listing, tmp_path) == total
    listing.write_text("0::/jobs/mine\n")
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "mine" / "memory.max").write_text("max\n")
    assert usable_bytes(listing, tmp_path) == total
    (tmp_path / "jobs" / "memory.max").write_text("123456\n")
    assert usable_bytes(listing, tmp_path) == 123456
