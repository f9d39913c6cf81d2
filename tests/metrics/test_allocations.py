from __future__ import annotations

import torch

from slipstream.metrics.allocations import Allocated, AllocationTrace

MB = 1_000_000


def test_what_is_there_at_one_time_and_at_the_end() -> None:
    before = torch.ones(MB // 4)
    trace = AllocationTrace(torch.device("cpu"))
    trace.start()
    first = torch.empty(MB, dtype=torch.uint8)
    second = torch.empty(2 * MB, dtype=torch.uint8)
    del second
    third = torch.empty(MB, dtype=torch.uint8)
    found = trace.stop()
    del first, third, before
    assert found == Allocated(peak=3 * MB, kept=2 * MB)


def test_a_trace_begins_anew() -> None:
    for size in (MB, 3 * MB):
        trace = AllocationTrace(torch.device("cpu"))
        trace.start()
        kept = torch.empty(size, dtype=torch.uint8)
        assert trace.stop() == Allocated(peak=size, kept=size)
        del kept
