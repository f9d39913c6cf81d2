"""Evaluation: generates and scores responses to fixed prompts.

Prompts and noise keys are the same in every call. So two evaluations differ only by the policy, and
can be compared prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.errors import DataError, did_you_mean
from slipstream.inference.protocol import InferenceEngine
from slipstream.metrics.batch_metrics import validation_metrics
from slipstream.rewards.protocol import SCORE_PART, RewardManager
from slipstream.rollout.episode import EpisodeRunner
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.types import Group, Prompt, Sample, SamplingParams, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Sampling settings: `n` responses per prompt, `batch_size` prompts at a time (None: all).

    `timeout_s` is the deadline of one batch of prompts, and `episode_timeout_s` of one episode, in
    seconds.
    """

    params: SamplingParams
    seed: int
    n: int = 1
    batch_size: int | None = None
    timeout_s: float = 3600.0
    episode_timeout_s: float | None = None
    episodes: EpisodeRunner | None = None
    """Runs episodes of several turns; None: every response is a single turn."""
    by_source: Mapping[str, EvalSettings] = field(default_factory=dict)
    """Settings for single data sources; they replace the others."""

    def of(self, source: str) -> EvalSettings:
        """The settings for prompts of the data source `source`."""
        return self.by_source.get(source, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scored groups in the order of the prompts, and their metrics."""

    groups: list[Group]
    metrics: dict[str, float]

    @property
    def correct(self) -> list[bool]:
        """For each response, in order of prompts: True if it is correct."""
        return [
            s.status is not Status.FAILED and _score(s) > 0
            for group in self.groups
            for s in group.samples
        ]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)


def _score(sample: Sample) -> float:
    """The accuracy of a sample, or its score without rewards of turns. The reward, if the
    environment alone gives rewards."""
    parts = sample.reward_parts
    if sample.episode is not None and sample.episode.score is not None:
        return sample.reward
    return parts.get("acc", parts.get(SCORE_PART, sample.reward))


class _Fixed:
    """A source of prompts that returns a list once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._left = list(prompts)

    def get_prompts(self, n: int) -> list[Prompt]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken


async def evaluate(
    engines: Sequence[InferenceEngine],
    prompts: Sequence[Prompt],
    reward_manager: RewardManager,
    settings: EvalSettings,
) -> Evaluation:
    """Generate and score `n` responses to each prompt; settings may differ by data source.

    Raises DataError if there are no prompts, or if settings name a data source without prompts;
    StageTimeoutError after the deadline; RewardError if a failed reward must end the run.
    """
    if not prompts:
        raise DataError("there are no prompts to evaluate on; set data.val_files or data.task")
    check_sources(prompts, settings)
    parts: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        source = prompt.data_source if prompt.data_source in settings.by_source else ""
        parts.setdefault(source, []).append(place)
    found: dict[int, Group] = {}
    for source, places in parts.items():
        chosen = [prompts[place] for place in places]
        groups = await _evaluate(engines, chosen, reward_manager, settings.of(source))
        for place, group in zip(places, groups, strict=True):
            group.index = place
            for sample in group.members:
                sample.group_index = place
            found[place] = group
    ordered = [found[place] for place in range(len(prompts))]
    metrics = validation_metrics(ordered, max_response_length=settings.params.max_tokens)
    return Evaluation(groups=ordered, metrics=metrics)


def check_sources(prompts: Sequence[Prompt], settings: EvalSettings) -> None:
    """Raise DataError if settings name a data source that no prompt has."""
    sources = {prompt.data_source for prompt in prompts}
    for name in settings.by_source:
        if name not in sources:
            raise DataError(
                f"actor_rollout_ref.rollout.val_kwargs.by_source names {name!r}, but no validation "
                f"prompt has that data source{did_you_mean(name, sources)} (data sources: "
                f"{', '.join(sorted(sources))})"
            )


async def _evaluate(
    engines: Sequence[InferenceEngine],
    prompts: Sequence[Prompt],
    reward_manager: RewardManager,
    settings: EvalSettings,
) -> list[Group]:
    """The groups of prompts with the same settings, in order."""
    manager = AsyncRolloutManager(
        engines,
        _Fixed(prompts),
        reward_manager,
        RolloutSettings(
            batch_size=settings.batch_size or max(len(prompts), 1),
            n=settings.n,
            params=settings.params,
            seed=settings.seed,
            namespace="val",
            timeout_s=settings.timeout_s,
            episode_timeout_s=settings.episode_timeout_s,
        ),
        episodes=settings.episodes,
    )
    groups: list[Group] = []
    while len(groups) < len(prompts):
        groups += await manager.generate_batch()
    return groups
