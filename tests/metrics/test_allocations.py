"""`AllocationTrace` reports held and peak memory at named points."""

from __future__ import annotations

import torch

from slipstream.metrics.allocations import AllocationTrace

MB = 1_000_000


def test_held_and_peak_bytes_at_each_mark() -> None:
    before = torch.ones(MB // 4)
    trace = AllocationTrace(torch.device("cpu"))
    trace.start()
    first = torch.empty(MB, dtype=torch.uint8)
    second = torch.empty(2 * MB, dtype=torch.uint8)
    del second
    trace.mark("one")
    third = torch.empty(MB, dtype=torch.uint8)
    trace.mark("two")
    del first, before
    trace.mark("three")
    held, peak = trace.stop()
    del third
    # Memory allocated before the start is not counted, even when it is freed later.
    assert held == {"one": MB, "two": 2 * MB, "three": MB}
    assert peak == {"one": 3 * MB, "two": 2 * MB, "three": 2 * MB}


def test_the_last_mark_of_a_name_counts_and_traces_are_independent() -> None:
    for size in (MB, 3 * MB):
        trace = AllocationTrace(torch.device("cpu"))
        trace.start()
        trace.mark("again")
        kept = torch.empty(size, dtype=torch.uint8)
        trace.mark("again")
        assert trace.stop() == ({"again": size}, {"again": size})
        del kept
