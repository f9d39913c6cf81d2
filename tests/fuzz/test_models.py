"""The short form of the fuzz of models. SLIPSTREAM_FUZZ=long runs all 100 inputs."""

from __future__ import annotations

from tests.fuzz.harness import LONG
from tests.fuzz.models import COUNT, run


def test_odd_models_are_accepted_or_refused() -> None:
    count = COUNT if LONG else 14
    result = run(count)
    assert result.wrong == []
    assert result.outcomes.keys() == {"accepted", "refused"}
    assert sum(result.outcomes.values()) == count
