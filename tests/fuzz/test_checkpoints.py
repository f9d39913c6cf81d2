"""The short form of the fuzz of checkpoints. SLIPSTREAM_FUZZ=long runs all 400 inputs."""

from __future__ import annotations

from tests.fuzz.checkpoints import COUNT, run
from tests.fuzz.harness import LONG


def test_odd_checkpoints_are_refused() -> None:
    count = COUNT if LONG else 42
    result = run(count)
    assert result.wrong == []
    assert dict(result.outcomes) == {"refused": count}
