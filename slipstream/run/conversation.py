"""The turns and answers of an episode, for the console and the report."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import PlacedReward, Sample, Segment


@dataclass(frozen=True, slots=True)
class Part:
    """A turn of the policy, or an answer. `branch` counts from 0. `rewards` are those of the
    turn."""

    branch: int
    segment: Segment
    rewards: list[PlacedReward]


def parts_of(sample: Sample) -> list[Part]:
    """Return the parts of a sample after the prompt of each branch, in order."""
    rewards = [] if sample.episode is None else sample.episode.rewards
    found: list[Part] = []
    for number, branch in enumerate(sample.branches):
        start = len(branch.prompt_ids)
        for segment in branch.answer_segments:
            end = start + len(segment.ids)
            own = [r for r in rewards if r.branch == number and start <= r.place < end]
            found.append(Part(number, segment, own))
            start = end
    return found
