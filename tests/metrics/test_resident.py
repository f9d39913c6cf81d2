"""Return of freed memory to the system."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from slipstream.heap import heap_in_use
from slipstream.metrics.resident import (
    HEAP_FACTOR,
    HEAP_NEED,
    FreedMemory,
    HeapNeed,
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


UNKNOWN = HeapNeed(in_use=lambda: None)
"""The need of a process whose C library does not count what is in use."""


def test_freed_memory_is_kept_below_the_limit() -> None:
    used = resident_bytes()
    assert not FreedMemory(limit_bytes=2 * used, need=UNKNOWN).give_back()
    assert FreedMemory(limit_bytes=used / 2, need=UNKNOWN).give_back()


def test_freed_memory_is_returned_if_the_process_has_more_than_it_needs() -> None:
    now, anonymous = 0.0, 150

    def gives_back() -> bool:
        nonlocal now
        now += 1
        return freed.give_back()

    need = HeapNeed(in_use=lambda: 100, anonymous=lambda: anonymous)
    freed = FreedMemory(lambda: now, limit_bytes=2 * resident_bytes(), need=need)
    assert gives_back()
    # 50 could not be returned, so they count as needed.
    assert not gives_back()
    anonymous = 151
    assert gives_back()
    need.note_temporary(200)
    need.note_temporary(10)  # The largest size counts.
    anonymous = 151 + int(HEAP_FACTOR * 200)
    assert not gives_back()
    anonymous += 1
    assert gives_back()
    need.forget()
    anonymous = 101
    assert gives_back()
    assert not UNKNOWN.has_too_much()
    assert UNKNOWN.in_use() == 0


@pytest.mark.skipif(heap_in_use() is None, reason="needs glibc 2.33")
def test_the_use_of_the_heap_follows_allocations() -> None:
    before = HEAP_NEED.in_use()
    small, large = torch.zeros(10_000_000), torch.zeros(50_000_000)
    assert HEAP_NEED.in_use() - before == pytest.approx(240e6, rel=0.02)
    del small, large
    assert HEAP_NEED.in_use() - before < 5e6


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
