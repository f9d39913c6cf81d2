"""GPG's advantages against values computed by hand."""

from __future__ import annotations

from tests.algorithms.advantages.helpers import per_row, plain


def test_gpg_scales_by_the_share_of_nonzero_scores() -> None:
    # alpha = 4 / 1; mean 0.25.
    assert per_row("gpg", plain([1.0, 0.0, 0.0, 0.0], "aaaa")) == [3.0, -1.0, -1.0, -1.0]
    assert per_row("gpg", plain([0.0, 0.0], "aa")) == [0.0, 0.0]


def test_gpg_counts_over_the_whole_batch() -> None:
    # alpha = 4 / 2; means 0.5 and 1.
    assert per_row("gpg", plain([1.0, 0.0, 2.0, 0.0], "aabb")) == [1.0, -1.0, 2.0, -2.0]


def test_gpg_keeps_the_scaled_raw_score_of_a_group_of_one() -> None:
    # alpha = 3 / 2.
    assert per_row("gpg", plain([2.0, 1.0, 0.0], "abb"))[0] == 3.0
