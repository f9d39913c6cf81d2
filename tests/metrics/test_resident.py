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


def test_freed_memory_that_a_step_needs_is_kept() -> None:
    now = resident = 0

    in_use = 100

    def trim(_: int) -> None:
        nonlocal resident
        resident = in_use

    def after(size: int) -> bool:
        """Whether memory is returned after a step that ends with `size` resident bytes."""
        nonlocal now, resident
        now, resident = now + 1, size
        return freed.give_back()

    freed = FreedMemory(lambda: now, lambda: resident, limit_bytes=1000)
    freed._trim = trim
    assert after(500)  # What a step needs is unknown.
    assert not after(300)  # A step needs 200.
    assert not after(100 + int(FreedMemory.GROWTH * 200))
    assert after(101 + int(FreedMemory.GROWTH * 200))
    assert not after(150)  # The largest need counts.
    assert not after(329)
    assert after(400)
    assert not after(700)  # A larger step needs 600.
    assert not after(790)
    assert after(791)
    assert not after(800)
    assert after(1001)  # The limit
    # The first step after a return loads 200 bytes that stay in use, so it seems to need 800.
    in_use = 300
    assert not after(900)
    freed._limit = 2000
    assert after(1021)
    # The return has freed 721, so a step needs no more.
    assert not after(300)
    assert not after(300 + int(FreedMemory.GROWTH * 721))
    assert after(301 + int(FreedMemory.GROWTH * 721))


def test_freed_memory_is_returned_above_the_limit_only() -> None:
    used = resident_bytes()
    kept = FreedMemory(limit_bytes=2 * used)
    assert kept.give_back()  # What a step needs is unknown.
    kept = FreedMemory(lambda: 1.0, lambda: 7, limit_bytes=7)
    returned = FreedMemory(lambda: 1.0, lambda: 7, limit_bytes=6)
    for freed in (kept, returned):
        freed._needed = 100
    assert not kept.give_back()
    assert returned.give_back()


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
