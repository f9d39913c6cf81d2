from __future__ import annotations

import torch

from slipstream.metrics.allocations import AllocationTrace

MB = 1_000_000


def test_what_is_held_at_a_moment_and_the_most_before_it() -> None:
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
    held, most = trace.stop()
    del third
    # What there was before the start, and is freed after it, never counts.
    assert held == {"one": MB, "two": 2 * MB, "three": MB}
    assert most == {"one": 3 * MB, "two": 2 * MB, "three": 2 * MB}


def test_of_moments_of_one_name_the_last_counts_and_a_trace_begins_anew() -> None:
    for size in (MB, 3 * MB):
        trace = AllocationTrace(torch.device("cpu"))
        trace.start()
        trace.mark("again")
        kept = torch.empty(size, dtype=torch.uint8)
        trace.mark("again")
        assert trace.stop() == ({"again": size}, {"again": size})
        del kept
