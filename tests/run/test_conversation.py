"""The turns and answers of an episode."""

from __future__ import annotations

from slipstream.run.conversation import parts_of
from slipstream.types import EpisodeRecord, PlacedReward, Sample, Segment


def branched() -> Sample:
    """An episode with two branches, a tool's answer, and a reward in each branch."""
    first = Sample(segments=[Segment.given("prompt", [1, 2]), Segment.given("assistant", [3, 4])])
    sample = Sample(earlier=[first])
    for role, ids in (("prompt", [1, 2, 3]), ("assistant", [5]), ("tool", [6]), ("assistant", [7])):
        sample.append(Segment.given(role, ids))
    rewards = [PlacedReward(3, "tool", -0.5), PlacedReward(5, "end", 1.0, 1)]
    sample.episode = EpisodeRecord(turns=3, rewards=rewards)
    return sample


def test_parts_have_the_rewards_of_their_turn_and_branch() -> None:
    sample = branched()
    assert sample.episode is not None
    first, last = sample.episode.rewards
    found = [(part.branch, part.segment.ids, part.rewards) for part in parts_of(sample)]
    assert found == [(0, [3, 4], [first]), (1, [5], []), (1, [6], []), (1, [7], [last])]
