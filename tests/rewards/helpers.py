"""Helpers: create a finished sample, and decode token ids."""

from __future__ import annotations

from typing import Any

from slipstream.types import Sample, Segment, Status


def decode(ids: list[int]) -> str:
    return " ".join(str(i) for i in ids)


def sample(*response: int, source: str = "exact_match", truth: Any = "1 2") -> Sample:
    return Sample(
        uid="u1",
        segments=[Segment.given("prompt", [9, 9]), Segment.given("assistant", list(response))],
        data_source=source,
        ground_truth=truth,
        extra_info={"index": 4},
        status=Status.COMPLETED,
    )
