"""Return of freed memory to the system."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from slipstream.metrics.resident import (
    FreedMemory,
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
    assert not FreedMemory(limit_bytes=2 * used).give_back()
    assert FreedMemory(limit_bytes=used / 2).give_back()


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
