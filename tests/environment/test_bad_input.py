"""Bad input has a message and the expected end. `bad_input` runs the slow cases, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment.bad_input import CASES, Case, mistakes


@pytest.mark.parametrize("case", [one for one in CASES if not one.slow], ids=lambda one: one.kind)
def test_bad_input_has_a_message_and_the_expected_end(case: Case, tmp_path: Path) -> None:
    found = case.run(tmp_path)
    assert mistakes(case, found) == [], found
