"""What a drafter that rests has missed, and how long batches last."""

from __future__ import annotations

import pytest

from slipstream.inference.speculation.catch_up import Rest


def test_what_was_missed_is_taken_in_by_drafting_and_thinned_by_new_requests() -> None:
    rest = Rest()
    rest.batch(4, 4)
    rest.stepped(1.0, drafted=False)
    rest.stepped(1.0, drafted=False)
    assert (rest.missed, rest.written) == (2, 2)
    # Four that missed two tokens each, and four that are new.
    rest.batch(8, 8)
    assert rest.missed == 1
    rest.stepped(2.5, drafted=True)
    assert (rest.missed, rest.written) == (0, 4.5)


def test_drafts_are_of_use_while_batches_last_as_long_as_those_before_them() -> None:
    rest = Rest()
    never, always = (lambda size: False), (lambda size: True)
    for tokens in (100, 300):
        rest.batch(16, 16)
        rest.stepped(40.0, drafted=False)
        assert rest.horizon(never) == (40 if tokens == 100 else 0)
        rest.batch(2, 2)
        # Of the first one nothing is known but its age.
        assert rest.horizon(always) == (32 if tokens == 100 else 100)
        rest.stepped(float(tokens), drafted=False)
        # It has lasted as long as was known, and three times as long.
        assert rest.horizon(always) == (100 if tokens == 100 else 200)
    rest.batch(16, 16)
    rest.stepped(10.0, drafted=False)
    assert rest.horizon(never) == 30
    assert rest.horizon(always) == 30 + 200
    assert rest.horizon(lambda size: size != 2) == 30


def test_the_cost_of_taking_in_is_learned_and_never_more_than_the_policys_own() -> None:
    rest = Rest()
    rest.batch(10, 12)
    rest.stepped(400.0, drafted=False)
    # 4000 tokens, at first at a fiftieth of a row.
    assert rest.cost(row=1.0) == pytest.approx(4000 * 0.02)
    rest.took_in(seconds=800.0, row=1.0)
    assert rest.cost(row=1.0) == pytest.approx(4000 * (800 + 20) / 5000)
    rest.stepped(3.0, drafted=True)
    assert rest.cost(row=1.0) == 0
    # Something else ran.
    other = Rest()
    other.batch(1, 1)
    other.stepped(10.0, drafted=False)
    other.took_in(seconds=9999.0, row=1.0)
    assert other.cost(row=1.0) == pytest.approx(10 * (10 + 20) / 1010)
