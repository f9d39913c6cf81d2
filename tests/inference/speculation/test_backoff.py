"""Speculation backoff: rollouts that are decoded plainly."""

from __future__ import annotations

from slipstream.inference.speculation.backoff import Backoff
from slipstream.inference.speculation.selector import bucket_of


def rollout(backoff: Backoff, *, gained: float, steps: int = 300, requests: int = 64) -> int:
    """Plain steps of a rollout; each other step takes a second and gains `gained` seconds."""
    skipped = min(backoff.begin_rollout(requests), steps)
    for _ in range(steps - skipped):
        backoff.record(1.0, gained)
    return skipped


def experienced() -> Backoff:
    """A backoff after the learning phase, for rollouts of 64 and of 4 requests."""
    backoff = Backoff(bucket_of)
    for requests in (64, 4):
        assert rollout(backoff, gained=-1.0, requests=requests) == 0
    return backoff


def skipped(backoff: Backoff, rollouts: int, *, gained: float) -> list[bool]:
    found = [rollout(backoff, gained=gained) for _ in range(rollouts)]
    assert set(found) <= {0, 300}
    return [steps == 300 for steps in found]


def test_more_and_more_rollouts_are_skipped_without_gain() -> None:
    found = skipped(experienced(), 60, gained=0.0)
    tried = [number for number, skip in enumerate(found) if not skip]
    assert tried == [0, 2, 5, 10, 19, 36, 53]


def test_no_rollout_is_skipped_with_a_gain_of_five_percent() -> None:
    assert not any(skipped(experienced(), 30, gained=0.051))
    assert any(skipped(experienced(), 2, gained=0.049))
    assert any(skipped(experienced(), 2, gained=-0.5))


def test_gains_and_losses_of_a_rollout_add_up() -> None:
    backoff = experienced()
    for _ in range(10):
        assert backoff.begin_rollout(64) == 0
        for gained in (-0.1, 0.3):
            for _ in range(200):
                backoff.record(1.0, gained)


def test_the_learning_phase_does_not_count() -> None:
    backoff = Backoff(bucket_of)
    assert [rollout(backoff, gained=-1.0, steps=100) for _ in range(3)] == [0, 0, 0]
    assert [rollout(backoff, gained=0.1, steps=100) for _ in range(3)] == [0, 0, 0]


def test_short_rollouts_are_judged_together() -> None:
    backoff = experienced()
    found = [rollout(backoff, gained=0.0, steps=60) for _ in range(7)]
    # 120 steps, one skipped, 120 steps, two skipped.
    assert found == [0, 0, 60, 0, 0, 60, 60]


def test_sizes_of_rollouts_are_judged_separately() -> None:
    backoff = experienced()
    found = [
        (rollout(backoff, gained=0.0), rollout(backoff, gained=0.2, requests=4)) for _ in range(3)
    ]
    assert found == [(0, 0), (300, 0), (0, 0)]


def test_a_very_long_plain_rollout_ends_its_backoff() -> None:
    backoff = experienced()
    assert rollout(backoff, gained=0.0) == 0
    assert rollout(backoff, gained=-1.0, steps=5000) == 4 * 300
    # This rollout is not judged, because its drafts began in the middle.
    assert rollout(backoff, gained=0.1) == 0
    assert rollout(backoff, gained=0.1) == 0


def test_a_gain_shortens_the_next_backoff() -> None:
    backoff = experienced()
    assert skipped(backoff, 10, gained=0.0).count(True) == 7  # one, two and four rollouts
    assert skipped(backoff, 1, gained=0.5) == [False]  # eight become four
    assert skipped(backoff, 1, gained=-0.5) == [False]
    assert skipped(backoff, 5, gained=0.0) == 4 * [True] + [False]


def test_earlier_trials_count_too() -> None:
    backoff = experienced()
    # Drafts gained 18 of 450 seconds: 300 of this trial, and half of the 300 of the one before.
    assert rollout(backoff, gained=0.0) == 0
    assert rollout(backoff, gained=0.0) == 300
    assert rollout(backoff, gained=0.06) == 0
    assert [rollout(backoff, gained=0.06) for _ in range(3)] == [300, 300, 0]
    backoff = experienced()
    # Half of a gain counts in the next trial and a quarter in the one after it.
    found = [rollout(backoff, gained=gained) for gained in (0.3, 0.0, 0.0, 0.0)]
    assert found == [0, 0, 0, 300]


def test_a_new_drafter_halves_the_backoff() -> None:
    backoff = experienced()
    assert skipped(backoff, 22, gained=0.0)[19:] == [False, True, True]
    # 14 of the 16 rollouts of the backoff are left.
    backoff.drafter_changed()
    assert skipped(backoff, 8, gained=0.0) == 7 * [True] + [False]
