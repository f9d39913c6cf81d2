"""The short form of the fuzz of config. SLIPSTREAM_FUZZ=long runs all 2000 inputs."""

from __future__ import annotations

from tests.fuzz.config import COUNT, run
from tests.fuzz.harness import LONG


def test_odd_config_are_accepted_or_refused() -> None:
    count = COUNT if LONG else 120
    result = run(count)
    assert result.wrong == []
    assert result.outcomes.keys() == {"accepted", "refused"}
    assert sum(result.outcomes.values()) == count
