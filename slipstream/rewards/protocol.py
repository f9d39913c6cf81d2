"""The interface of rewards: scores, and who computes them.

Rollouts call a `RewardManager`. Users may implement `Reward`, which gets whole samples, instead of
a function with verl's text signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from slipstream.errors import shortened
from slipstream.types import Sample, Status, StopReason

OnFailure = Literal["zero", "drop", "stop"]
"""Policy for failed scoring calls: score 0, drop the sample, or stop the run."""


PRIME = "reward_model.reward_manager=prime"
"""The setting that calls reward functions in the main thread of worker processes."""

Decode = Callable[[list[int]], str]
"""From token ids to text."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response.

    `parts` are named components for metrics. `answer` is the answer parsed from the response, used
    for majority votes. `extras` are texts for the dump. `ok` says whether the score may be used for
    training. `failure` says why scoring failed. After a failure, the policy "zero" gives value 0.0
    and `ok` True; the policy "drop" gives `ok` False.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    ok: bool = True
    failure: str | None = None
    answer: str | None = None
    extras: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Reward(Protocol):
    """Scores one finished sample. It may raise: the manager turns exceptions into failures."""

    def score(self, sample: Sample) -> Score: ...


@runtime_checkable
class RewardManager(Protocol):
    """Runs a reward function with deadlines and a failure policy."""

    async def score_sample(self, sample: Sample) -> Score:
        """Return the score of a sample. Raises RewardError if a failure must end the run."""
        ...

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample, in order. They are computed concurrently."""
        ...


@runtime_checkable
class GroupRewardManager(RewardManager, Protocol):
    """A manager whose scores also depend on the other responses to the same prompt."""

    async def finish_group(self, samples: Sequence[Sample]) -> None:
        """Adjust the rewards of a group whose samples all have scores (see `apply_score`).

        Raises RewardError if a failure must end the run.
        """
        ...


SCORE_PART = "score"

TURN_PART = "turn/"
"""Prefix of reward parts that are rewards of turns. A sample without such a turn has no part."""

REWARD_FAILURE = "reward_failure"
"""Key in a sample's metadata with the reason of a scoring failure that counts as zero."""


ANSWER_READ = "pred"
"""Key in a sample's metadata with the answer parsed from its response."""


REWARD_EXTRAS = "reward_extras"
"""Key in a sample's metadata with the texts that its reward function logged, by column."""


def apply_score(sample: Sample, score: Score) -> None:
    """Write a score into its sample.

    If the score is not `ok`, the sample becomes `FAILED` with the reason. A failure that counts as
    zero keeps the status; its reason is stored in `metadata["reward_failure"]`.
    """
    sample.reward = score.value
    sample.reward_parts = {**score.parts, SCORE_PART: score.value}
    if score.answer is not None:
        sample.metadata[ANSWER_READ] = shortened(score.answer)
    if score.extras:
        sample.metadata[REWARD_EXTRAS] = dict(score.extras)
    # A user's own manager may give a reason of any length.
    failure = None if score.failure is None else shortened(score.failure)
    if not score.ok:
        sample.status = Status.FAILED
        sample.failure = failure
    elif failure is not None:
        sample.metadata[REWARD_FAILURE] = failure


def response_text(sample: Sample, decode: Decode) -> str:
    """Return the text of a response, without the token that ended it. The responses of an episode's
    branches follow each other."""
    ids = sample.all_response_ids
    return decode(ids[:-1] if sample.stop_reason is StopReason.EOS else ids)
