"""The buffer of co-training: eviction, age, the order of batches, and its saved state."""

from __future__ import annotations

import itertools
from dataclasses import replace

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


def entry(name: str, tokens: int, step: int = 1) -> BufferedSequence:
    """A response of `tokens` tokens, 16 bytes each."""
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


def names(buffered: DraftBuffer) -> list[str]:
    return [one["key"][3] for one in buffered.state_dict()["kept"]]


def test_eviction_drops_the_oldest_but_protects_the_longest() -> None:
    buffered = buffer(max_bytes=16 * 30, long_share=0.5)
    buffered.add(entry("long", 12))
    for name in "abcd":
        buffered.add(entry(name, 6, 2))
    assert names(buffered) == ["long", "b", "c", "d"]
    assert buffered.nbytes == 16 * 30
    assert (buffered.counts.received, buffered.counts.evicted) == (5, 1)
    # Both long ones would exceed the protected half, so the older one is evicted.
    buffered.add(entry("longer", 14, 3))
    assert names(buffered) == ["c", "d", "longer"]
    assert buffered.counts.evicted == 3


def test_eviction_drops_the_oldest_if_long_share_is_0() -> None:
    buffered = buffer(max_bytes=16 * 20, long_share=0.0)
    for step, (name, tokens) in enumerate((("long", 12), ("a", 6), ("b", 6))):
        buffered.add(entry(name, tokens, step))
    assert names(buffered) == ["a", "b"]


def test_arrival_order_does_not_matter() -> None:
    orders = []
    for order in itertools.permutations("abcd"):
        buffered = buffer(max_bytes=16 * 20, long_share=0.5)
        for name in order:
            buffered.add(entry(name, 4 + 6 * (name == "b"), 1 + (name == "c")))
        taken = [s.tokens for batch in buffered.batches(2, "k") for s in batch]
        orders.append((names(buffered), taken))
        assert buffered.nbytes == 16 * 18
    assert orders[0][0] == ["b", "d", "c"]
    assert all(one == orders[0] for one in orders)


def test_newest_used_policy_version_is_tracked_and_restored() -> None:
    buffered = buffer(max_uses=1, lookback_steps=9)
    known = [buffered.newest_used]
    for step, version in ((1, 3), (2, 5)):
        one = entry(f"s{step}", 3, step)
        one.version = version
        buffered.add(one)
        next(buffered.batches(1, "k"))
        known.append(buffered.newest_used)
    assert known == [None, 3, 5]
    other = buffer(lookback_steps=9)
    other.load_state_dict(buffered.state_dict())
    assert other.newest_used == 5
    assert [one["version"] for one in other.state_dict()["kept"]] == [3, 5]


def test_rejects_a_response_larger_than_the_buffer() -> None:
    with pytest.raises(ConfigError, match="buffer_bytes=64 cannot hold one response of 5 tokens"):
        buffer(max_bytes=64).add(entry("a", 5))


def test_drops_responses_older_than_lookback_steps() -> None:
    buffered = buffer(lookback_steps=2)
    for step in (1, 2, 3):
        buffered.add(entry(f"s{step}", 3, step))
    buffered.drop_before(3)
    assert names(buffered) == ["s2", "s3"]
    assert buffered.counts.too_old == 1
    assert buffered.nbytes == 2 * 3 * 16
    buffered.drop_before(9)
    assert len(buffered) == buffered.nbytes == 0


def test_prompts_take_turns() -> None:
    buffered = buffer(max_uses=2, lookback_steps=5)
    for step, samples in ((1, 3), (2, 2)):
        for number in range(2):
            for index in range(samples):
                one = entry(f"s{step}n{number}", 3 + index, step)
                one.key = replace(one.key, index=index)
                buffered.add(one)
    batches = [
        sorted((int(s.features_TF[0, 0]), len(s.tokens)) for s in batch)
        for batch in buffered.batches(4, "k")
    ]
    # By step and length: one sample of each prompt, then the next one.
    assert batches == [
        *([(1, n), (1, n), (2, n), (2, n)] for n in (3, 4)),
        # The prompts with two samples begin anew, and the others have a third sample.
        [(1, 5), (1, 5), (2, 3), (2, 3)],
        [(1, 3), (1, 3), (2, 4), (2, 4)],
        *([(1, n), (1, n)] for n in (4, 5)),
    ]
    # All responses reached max_uses.
    assert not [*buffered.batches(4, "k")]
    buffered.add(entry("fresh", 4, 2))
    assert [len(batch) for batch in buffered.batches(2, "k")] == [1, 1]


def test_prompts_that_were_used_least_come_first() -> None:
    buffered = buffer(lookback_steps=5)
    for name in "ab":
        buffered.add(entry(name, 3))
    next(buffered.batches(2, "k"))
    buffered.add(entry("c", 7, 2))
    first, *rest = itertools.islice(buffered.batches(2, "k"), 3)
    assert [len(s.tokens) for s in first] == [7]
    assert sorted(len(s.tokens) for batch in rest for s in batch) == [3, 3, 7]


def test_only_batches_that_were_taken_count_as_used() -> None:
    buffered = buffer(max_uses=1)
    for number in range(4):
        buffered.add(entry(f"n{number}", 3))
    taken = list(itertools.islice(buffered.batches(2, "k"), 1))
    assert len(taken[0]) == 2
    assert sum(len(batch) for batch in buffered.batches(2, "k")) == 2


def test_restored_buffer_continues_equally() -> None:
    buffered = buffer(lookback_steps=3, max_uses=2)
    for step in (1, 2):
        for number in range(5):
            buffered.add(entry(f"s{step}n{number}", 3 + number, step))
    next(iter(buffered.batches(2, "a")))
    other = buffer(lookback_steps=3, max_uses=2)
    other.load_state_dict(buffered.state_dict())
    assert other.nbytes == buffered.nbytes
    assert other.counts == buffered.counts
    ours = [[s.tokens for s in batch] for batch in buffered.batches(2, "b")]
    assert [[s.tokens for s in batch] for batch in other.batches(2, "b")] == ours
    one = entry("a", 4, 7)
    back = from_tree(to_tree(one))
    assert (back.key, back.step, back.uses) == (one.key, 7, 0)
    assert torch.equal(back.sequence.features_TF, one.sequence.features_TF)
    small = buffer(max_bytes=16 * 12, long_share=0.0)
    small.load_state_dict(buffered.state_dict())
    assert names(small) == ["s2n4"]


@pytest.mark.parametrize(
    ("name", "value"), [("max_bytes", 0), ("lookback_steps", 0), ("max_uses", 0), ("long_share", 2)]
)
def test_rejects_impossible_limits(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"draft buffer: {name}={value}"):
        BufferSettings(**{name: value})  # type: ignore[arg-type]
