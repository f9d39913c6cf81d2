"""What the buffer of co-training keeps, what it gives up, and in which order it is trained on."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.drafter.buffer import (
    BufferedSequence,
    BufferSettings,
    DraftBuffer,
    from_tree,
    to_tree,
)
from slipstream.drafter.sequences import DraftSequence
from slipstream.errors import ConfigError
from slipstream.types import NoiseKey

WIDTH = 4


def kept(name: str, tokens: int, step: int = 1) -> BufferedSequence:
    """`tokens` of 16 bytes each."""
    return BufferedSequence(
        sequence=DraftSequence(
            tokens=list(range(tokens)),
            features_TF=torch.full((tokens, WIDTH), float(step)),
            loss_mask=[1.0] * tokens,
        ),
        key=NoiseKey(seed=1, uid=name),
        step=step,
    )


def buffer(**settings: float) -> DraftBuffer:
    return DraftBuffer(BufferSettings(**settings))  # type: ignore[arg-type]


def names(held: DraftBuffer) -> list[str]:
    return [one["key"][3] for one in held.state_dict()["kept"]]


def test_beyond_its_bytes_the_oldest_are_given_up_but_not_the_longest() -> None:
    held = buffer(max_bytes=16 * 30, long_share=0.5)
    held.add(kept("long", 12))
    for name in "abcd":
        held.add(kept(name, 6, 2))
    assert names(held) == ["long", "b", "c", "d"]
    assert held.nbytes == 16 * 30
    assert (held.counts.received, held.counts.evicted) == (5, 1)
    # Two long ones are more than half.
    held.add(kept("longer", 14, 3))
    assert names(held) == ["c", "d", "longer"]
    assert held.counts.evicted == 3


def test_without_a_share_for_the_longest_the_oldest_go() -> None:
    held = buffer(max_bytes=16 * 20, long_share=0.0)
    for step, (name, tokens) in enumerate((("long", 12), ("a", 6), ("b", 6))):
        held.add(kept(name, tokens, step))
    assert names(held) == ["a", "b"]


def test_who_came_in_first_does_not_matter() -> None:
    orders = []
    for order in itertools.permutations("abcd"):
        held = buffer(max_bytes=16 * 20, long_share=0.5)
        for name in order:
            held.add(kept(name, 4 + 6 * (name == "b"), 1 + (name == "c")))
        taken = [s.tokens for batch in held.batches(2, "k") for s in batch]
        orders.append((names(held), taken))
        assert held.nbytes == 16 * 18
    assert orders[0][0] == ["b", "d", "c"]
    assert all(one == orders[0] for one in orders)


def test_the_newest_policy_whose_responses_were_trained_on() -> None:
    held = buffer(max_uses=1, lookback_steps=9)
    known = [held.newest_used]
    for step, version in ((1, 3), (2, 5)):
        one = kept(f"s{step}", 3, step)
        one.version = version
        held.add(one)
        next(held.batches(1, "k"))
        known.append(held.newest_used)
    assert known == [None, 3, 5]
    other = buffer(lookback_steps=9)
    other.load_state_dict(held.state_dict())
    assert other.newest_used == 5
    assert [one["version"] for one in other.state_dict()["kept"]] == [3, 5]


def test_a_response_larger_than_the_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_bytes=64 cannot hold one response of 5 tokens"):
        buffer(max_bytes=64).add(kept("a", 5))


def test_it_looks_back_as_many_steps_as_it_is_told() -> None:
    held = buffer(lookback_steps=2)
    for step in (1, 2, 3):
        held.add(kept(f"s{step}", 3, step))
    held.forget_before(3)
    assert names(held) == ["s2", "s3"]
    assert held.counts.too_old == 1
    assert held.nbytes == 2 * 3 * 16
    held.forget_before(9)
    assert len(held) == held.nbytes == 0


def test_the_newest_of_those_least_trained_on_come_first() -> None:
    held = buffer(max_uses=2, lookback_steps=5)
    for step in (1, 2):
        for number in range(3):
            held.add(kept(f"s{step}n{number}", 3 + number, step))
    steps = [int(batch[0].features_TF[0, 0]) for batch in held.batches(2, "k")]
    sizes = [len(batch) for batch in held.batches(2, "k")]
    assert steps == [2, 2, 1, 1, 2, 2, 1, 1]
    # They have been used up.
    assert sizes == []
    held.add(kept("fresh", 4, 2))
    assert [len(batch) for batch in held.batches(2, "k")] == [1, 1]


def test_only_batches_that_were_taken_count() -> None:
    held = buffer(max_uses=1)
    for number in range(4):
        held.add(kept(f"n{number}", 3))
    taken = list(itertools.islice(held.batches(2, "k"), 1))
    assert len(taken[0]) == 2
    assert sum(len(batch) for batch in held.batches(2, "k")) == 2


def test_what_is_restored_goes_on_alike() -> None:
    held = buffer(lookback_steps=3, max_uses=2)
    for step in (1, 2):
        for number in range(5):
            held.add(kept(f"s{step}n{number}", 3 + number, step))
    next(iter(held.batches(2, "a")))
    other = buffer(lookback_steps=3, max_uses=2)
    other.load_state_dict(held.state_dict())
    assert other.nbytes == held.nbytes
    assert other.counts == held.counts
    ours = [[s.tokens for s in batch] for batch in held.batches(2, "b")]
    assert [[s.tokens for s in batch] for batch in other.batches(2, "b")] == ours
    one = kept("a", 4, 7)
    back = from_tree(to_tree(one))
    assert (back.key, back.step, back.uses) == (one.key, 7, 0)
    assert torch.equal(back.sequence.features_TF, one.sequence.features_TF)
    small = buffer(max_bytes=16 * 12, long_share=0.0)
    small.load_state_dict(held.state_dict())
    assert names(small) == ["s2n4"]


@pytest.mark.parametrize(
    ("name", "value"), [("max_bytes", 0), ("lookback_steps", 0), ("max_uses", 0), ("long_share", 2)]
)
def test_impossible_limits_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"draft buffer: {name}={value}"):
        BufferSettings(**{name: value})  # type: ignore[arg-type]
