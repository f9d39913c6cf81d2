"""The short form of the fuzz of data. SLIPSTREAM_FUZZ=long runs all 200 inputs."""

from __future__ import annotations

from tests.fuzz.data import COUNT, run
from tests.fuzz.harness import LONG


def test_odd_data_are_accepted_or_refused() -> None:
    count = COUNT if LONG else 60
    result = run(count)
    assert result.wrong == []
    assert result.outcomes.keys() == {"accepted", "refused"}
    assert sum(result.outcomes.values()) == count
