"""Return of freed memory to the system."""

from __future__ import annotations

import torch

from slipstream.metrics.resident import FreedMemory, resident_bytes


def test_freed_memory_is_returned_to_the_system_at_intervals() -> None:
    now = 10.0
    freed = FreedMemory(lambda: now)
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
