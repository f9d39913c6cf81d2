"""The seam of rewards: what a score is, and who gives one.

Knows no reward. Rollouts call a `RewardManager`; a `Reward` is what users may write against whole
samples instead of VERL's text signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from slipstream.types import Sample, Status

OnFailure = Literal["zero", "drop", "stop"]
"""What a failed scoring call means: value 0, no usable score, or the end of the run."""


@dataclass(frozen=True, slots=True)
class Score:
    """What one response is worth.

    `parts` are named components for metrics. `answer` is what was read as the response's answer, by
    which responses vote. `ok` says whether the score may be trained on;
    `failure` why scoring failed. A failure with policy "zero" has value 0.0 and `ok`, with policy
    "drop" it is not `ok`.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    ok: bool = True
    failure: str | None = None
    answer: str | None = None


@runtime_checkable
class Reward(Protocol):
    """Scores one finished sample. May raise: the manager turns that into a failure."""

    def score(self, sample: Sample) -> Score: ...


@runtime_checkable
class RewardManager(Protocol):
    """Runs a reward with deadlines and a policy for failures."""

    async def score_sample(self, sample: Sample) -> Score:
        """Raises `RewardError` where a failure must end the run."""
        ...

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample, in order; they are computed at the same time."""
        ...


@runtime_checkable
class GroupRewardManager(RewardManager, Protocol):
    """One whose scores depend on the other responses to a prompt, too."""

    async def finish_group(self, samples: Sequence[Sample]) -> None:
        """Change the rewards of a group whose samples all have theirs (`apply_score`).

        Raises `RewardError` where a failure must end the run.
        """
        ...


SCORE_PART = "score"

REWARD_FAILURE = "reward_failure"
"""Where a sample's metadata keeps why its scoring failed and counts as zero."""


ANSWER_READ = "pred"
"""Where a sample's metadata keeps what was read as its answer."""


def apply_score(sample: Sample, score: Score) -> None:
    """Write a score into its sample.

    A score that is not `ok` makes the sample `FAILED` with the reason. A failure that counts as
    zero leaves the status alone and keeps the reason in `metadata["reward_failure"]`.
    """
    sample.reward = score.value
    sample.reward_parts = {**score.parts, SCORE_PART: score.value}
    if score.answer is not None:
        sample.metadata[ANSWER_READ] = score.answer
    if not score.ok:
        sample.status = Status.FAILED
        sample.failure = score.failure
    elif score.failure is not None:
        sample.metadata[REWARD_FAILURE] = score.failure
