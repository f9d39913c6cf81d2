"""The content of the last box is extracted."""

from __future__ import annotations

import pytest

from slipstream.rewards.scorers.boxed import last_boxed

MEGABYTE = "x" * 1_000_000


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("", None),
        ("no box", None),
        (r"\boxed{}", ""),
        (r"\boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n  {5} 6", "5"),
        (r"\fbox {5}", "5"),
        (r"\boxed{\left\{ 5 \right.}", r"\left\{ 5 \right."),
        (r"\boxed {5", None),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"\fbox{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1", None),
        (r"\boxed{1} and then \boxed{2", None),
        (r"\boxed 7$ and more", "7"),
        (r"$\boxed 7", "7"),
        ("\\boxed 7\nmore", "7"),
        (r"\boxed ", None),
        (r"\boxed5", None),
        (r"\BOXED{5}", None),
        (r"\boxed{π/2}", "π/2"),
        (r"\boxed{ 5 }", " 5 "),
        (MEGABYTE + r"\boxed{5}" + MEGABYTE, "5"),
        (r"\boxed{" + MEGABYTE, None),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside
