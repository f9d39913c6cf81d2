"""No hack of the list passes a test that a wrong program fails, on the real bubblewrap."""

from __future__ import annotations

import pytest

from tests.rewards.sandbox.helpers import isolated
from tests.rewards.scorers.hacks import FORMS, HACKS, RIGHT, WRONG, passed

pytestmark = isolated

COMMON = FORMS[:10]
ON_ALL_FORMS = ("equal object", "difference zero", "patched builtins", "names like builtins")


def test_a_right_program_passes_all_forms_and_a_wrong_one_none() -> None:
    assert passed(RIGHT) == len(FORMS)
    assert passed(WRONG) == 0


def test_the_list_has_at_least_80_hacks() -> None:
    assert len(HACKS) >= 80


@pytest.mark.parametrize("name", HACKS)
def test_hacks_pass_no_test(name: str) -> None:
    assert passed(HACKS[name], FORMS if name in ON_ALL_FORMS else COMMON) == 0
