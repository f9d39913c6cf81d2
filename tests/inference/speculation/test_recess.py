"""Rollouts that nobody drafts for."""

from __future__ import annotations

from slipstream.inference.speculation.recess import Recess
from slipstream.inference.speculation.selector import bucket_of


def rollout(recess: Recess, *, gained: float, steps: int = 300, requests: int = 64) -> int:
    """Steps of a rollout that are not drafted for; all others take a second and gain so many."""
    skipped = min(recess.begin_rollout(requests), steps)
    for _ in range(steps - skipped):
        recess.stepped(1.0, gained)
    return skipped


def experienced() -> Recess:
    """One that has learned what it can of rollouts of 64, and of 4."""
    recess = Recess(bucket_of)
    for requests in (64, 4):
        assert rollout(recess, gained=-1.0, requests=requests) == 0
    return recess


def skipped(recess: Recess, rollouts: int, *, gained: float) -> list[bool]:
    found = [rollout(recess, gained=gained) for _ in range(rollouts)]
    assert set(found) <= {0, 300}
    return [steps == 300 for steps in found]


def test_where_nothing_is_gained_more_and_more_are_skipped() -> None:
    found = skipped(experienced(), 60, gained=0.0)
    tried = [number for number, skip in enumerate(found) if not skip]
    assert tried == [0, 2, 5, 10, 19, 36, 53]


def test_where_something_is_gained_none_is() -> None:
    assert not any(skipped(experienced(), 30, gained=0.051))
    assert any(skipped(experienced(), 2, gained=0.049))
    assert any(skipped(experienced(), 2, gained=-0.5))


def test_gains_among_few_make_up_for_losses_among_many() -> None:
    recess = experienced()
    for _ in range(10):
        assert recess.begin_rollout(64) == 0
        for gained in (-0.1, 0.3):
            for _ in range(200):
                recess.stepped(1.0, gained)


def test_what_is_learned_from_does_not_count() -> None:
    recess = Recess(bucket_of)
    assert [rollout(recess, gained=-1.0, steps=100) for _ in range(3)] == [0, 0, 0]
    assert [rollout(recess, gained=0.1, steps=100) for _ in range(3)] == [0, 0, 0]


def test_short_rollouts_are_judged_together() -> None:
    recess = experienced()
    found = [rollout(recess, gained=0.0, steps=60) for _ in range(7)]
    # 120 steps, one skipped, 120 steps, two skipped.
    assert found == [0, 0, 60, 0, 0, 60, 60]


def test_sizes_are_told_apart() -> None:
    recess = experienced()
    found = [
        (rollout(recess, gained=0.0), rollout(recess, gained=0.2, requests=4)) for _ in range(3)
    ]
    assert found == [(0, 0), (300, 0), (0, 0)]


def test_one_that_does_not_end_is_drafted_for_after_all() -> None:
    recess = experienced()
    assert rollout(recess, gained=0.0) == 0
    assert rollout(recess, gained=-1.0, steps=5000) == 4 * 300
    # It says nothing of what drafts gain: they began in its midst.
    assert rollout(recess, gained=0.1) == 0
    assert rollout(recess, gained=0.1) == 0


def test_a_gain_makes_the_next_recess_shorter() -> None:
    recess = experienced()
    assert skipped(recess, 10, gained=0.0).count(True) == 7  # one, two and four rollouts
    assert skipped(recess, 1, gained=0.5) == [False]  # eight become four
    assert skipped(recess, 1, gained=-0.5) == [False]
    assert skipped(recess, 5, gained=0.0) == 4 * [True] + [False]


def test_one_trial_is_not_believed_alone() -> None:
    recess = experienced()
    # Of 300 seconds and half of 300 before, 18 are gained.
    assert rollout(recess, gained=0.0) == 0
    assert rollout(recess, gained=0.0) == 300
    assert rollout(recess, gained=0.06) == 0
    assert [rollout(recess, gained=0.06) for _ in range(3)] == [300, 300, 0]
    recess = experienced()
    # Of what is gained once, half counts in the next trial and a quarter in the one after it.
    found = [rollout(recess, gained=gained) for gained in (0.3, 0.0, 0.0, 0.0)]
    assert found == [0, 0, 0, 300]


def test_another_drafter_is_tried_sooner() -> None:
    recess = experienced()
    assert skipped(recess, 22, gained=0.0)[19:] == [False, True, True]
    # Of sixteen, fourteen are left.
    recess.drafter_changed()
    assert skipped(recess, 8, gained=0.0) == 7 * [True] + [False]
