"""When nobody drafts at all."""

from __future__ import annotations

from slipstream.inference.speculation.recess import Recess
from slipstream.inference.speculation.selector import bucket_of


def rollout(recess: Recess, *, gained: float, steps: int = 200, running: int = 64) -> int:
    """Steps of a recess, in a rollout whose others take a second and gain so many."""
    rested = 0
    for _ in range(steps):
        if recess.rests(running):
            rested += 1
        else:
            recess.stepped(1.0, gained)
    recess.ended()
    return rested


def rests(recess: Recess, rollouts: int, *, gained: float) -> list[bool]:
    found = [rollout(recess, gained=gained) for _ in range(rollouts)]
    assert set(found) <= {0, 200}
    return [steps == 200 for steps in found]


def test_what_gains_nothing_rests_for_longer_and_longer() -> None:
    found = rests(Recess(bucket_of), 60, gained=0.0)
    tried = [number for number, rest in enumerate(found) if not rest]
    assert tried == [0, 2, 5, 10, 19, 36, 53]


def test_what_gains_never_rests() -> None:
    assert not any(rests(Recess(bucket_of), 30, gained=0.021))
    assert any(rests(Recess(bucket_of), 2, gained=0.019))
    assert any(rests(Recess(bucket_of), 2, gained=-0.5))


def test_gains_among_few_make_up_for_losses_among_many() -> None:
    recess = Recess(bucket_of)
    for _ in range(10):
        for running, seconds, gained in ((64, 1.0, -0.1), (4, 1.0, 0.3)):
            for _ in range(60):
                assert not recess.rests(running)
                recess.stepped(seconds, gained)
        recess.ended()


def test_short_rollouts_are_judged_together() -> None:
    recess = Recess(bucket_of)
    found = [rollout(recess, gained=0.0, steps=40) for _ in range(7)]
    assert found == [0, 0, 0, 40, 40, 40, 0]


def test_batch_sizes_rest_apart() -> None:
    recess = Recess(bucket_of)
    found = [
        (rollout(recess, gained=0.0), rollout(recess, gained=0.2, running=4)) for _ in range(3)
    ]
    assert found == [(0, 0), (200, 0), (0, 0)]


def test_the_largest_batch_says_which_rollout_it_is() -> None:
    recess = Recess(bucket_of)
    rollout(recess, gained=0.0)
    # Requests come one after the other.
    assert [recess.rests(running) for running in (1, 30, 64, 64, 3)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_recess_ends_with_a_rollout() -> None:
    recess = Recess(bucket_of)
    rollout(recess, gained=0.0)
    # Of 200 steps ten are left, for which the next rollout need not rest.
    assert rollout(recess, gained=0.0, steps=190) == 190
    assert rollout(recess, gained=0.0, steps=300) == 0
    # In one that outlasts it, it ends all the same; such a rollout says nothing of its drafts.
    assert rollout(recess, gained=-1.0, steps=700) == 600
    assert rollout(recess, gained=0.1) == 0
    assert rollout(recess, gained=0.1) == 0


def test_a_gain_makes_the_next_recess_shorter() -> None:
    recess = Recess(bucket_of)
    assert rests(recess, 10, gained=0.0).count(True) == 7  # one, two and four rollouts
    assert rests(recess, 1, gained=0.1) == [False]  # eight become four
    assert rests(recess, 6, gained=0.0) == [False] + 4 * [True] + [False]


def test_another_drafter_is_tried() -> None:
    recess = Recess(bucket_of)
    rests(recess, 20, gained=0.0)
    recess.drafter_changed()
    # Sixteen become eight.
    assert rests(recess, 10, gained=0.0) == [False] + 8 * [True] + [False]


def test_nothing_happens_twice_when_nothing_runs() -> None:
    recess = Recess(bucket_of)
    rollout(recess, gained=0.0)
    recess.ended()
    recess.ended()
    assert rests(recess, 2, gained=0.0) == [True, False]
