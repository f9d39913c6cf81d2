"""FastRL's selectors: bandits that choose a draft plan by measured tokens per second.

    EG     epsilon-greedy: the plan with the best median, or with probability epsilon any plan
    UCB1   the plan with the best upper confidence bound of its mean
    BEG    EG among the plans of one `verify_tokens`, which the batch size determines

Unlike `CostModelSelector`, a bandit knows a plan only from its own steps, separately for each batch
size (FastRL's `MABGroupManager`). It decodes without drafts only beyond `bs_threshold`, or if
`0_0_1` is one of the plans.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import StepRecord, bucket_of

EPSILON = 0.1
"""Default probability of a random plan."""

WINDOW = 300
"""Default number of rewards that are kept per plan and batch size."""

_TRIMMED = 0.1
"""Share of the rewards that UCB1 removes at either end, because other programs disturb some
steps."""

_KEPT_ON_CHANGE = 0.5
"""Share of the rewards (the newest ones) that is kept when the policy or the drafter changes."""

Rewards = Mapping[DraftPlan, Sequence[float]]
"""Recent rewards (tokens per second) of each plan at one batch size, at least one per plan."""


class Rule(Protocol):
    """A bandit algorithm."""

    def pick(self, earned: Rewards, rng: random.Random) -> DraftPlan:
        """Choose one of the plans by their rewards."""
        ...


@dataclass(frozen=True, slots=True)
class EpsilonGreedy:
    """The plan with the best median; with probability `epsilon` any plan. Raises ConfigError if
    `epsilon` is no probability."""

    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ConfigError(f"epsilon={self.epsilon} must be from 0 to 1")

    def pick(self, earned: Rewards, rng: random.Random) -> DraftPlan:
        """Choose the plan with the best median, or a random plan."""
        if rng.random() < self.epsilon:
            return rng.choice(list(earned))
        return max(earned, key=lambda plan: median(earned[plan]))


@dataclass(frozen=True, slots=True)
class UpperConfidenceBound:
    """UCB1 (Auer et al. 2002) on means without the lowest and highest tenth.

    The bounds assume rewards from 0 to 1, so means are divided by the best mean. Without this, the
    exploration bonus is negligible next to thousands of tokens per second, as in FastRL.
    """

    def pick(self, earned: Rewards, rng: random.Random) -> DraftPlan:
        """Choose the plan with the best upper confidence bound."""
        means = {plan: _trimmed_mean(rewards) for plan, rewards in earned.items()}
        best = max(means.values())
        tries = math.log(sum(map(len, earned.values())))
        return max(
            earned, key=lambda plan: means[plan] / best + math.sqrt(2 * tries / len(earned[plan]))
        )


def _trimmed_mean(rewards: Sequence[float]) -> float:
    cut = int(len(rewards) * _TRIMMED)
    return fmean(sorted(rewards)[cut : len(rewards) - cut])


class BanditSelector:
    """A `StrategySelector` that applies a bandit rule to the plans of a batch size.

    Plans without a reward at the batch size are tried first. Steps with extra work (draft catch-up
    or new requests) give no reward, because their time depends on the plans before.
    """

    def __init__(
        self,
        buckets: Mapping[int, Sequence[DraftPlan]],
        rule: Rule,
        *,
        bs_threshold: int | None = None,
        window: int = WINDOW,
        seed: int = 0,
    ) -> None:
        """`buckets` maps the least number of running requests to plans; one bucket must start at 1.
        Each plan and batch size keeps its last `window` rewards. Beyond `bs_threshold` running
        requests nothing is drafted. Raises ConfigError for a bucket without plans, if no bucket
        starts at 1, or if `window` is less than 1."""
        self._starts = sorted(buckets)
        if not self._starts or self._starts[0] != 1:
            raise ConfigError(
                f"the first bucket of a bandit must start at 1 running request, not at "
                f"{self._starts[:1]}"
            )
        for start in self._starts:
            if not buckets[start]:
                raise ConfigError(f"the bucket that starts at {start} running requests has no plan")
        if window < 1:
            raise ConfigError(f"window={window} must be at least 1")
        self.buckets = {start: tuple(dict.fromkeys(buckets[start])) for start in self._starts}
        self._rule = rule
        self._threshold = bs_threshold
        self._window = window
        self._rng = random.Random(seed)
        self._earned: dict[int, dict[DraftPlan, deque[float]]] = {}

    def table(self) -> str:
        """A line with the plans of all buckets."""
        parts = [(start, " ".join(map(str, plans))) for start, plans in self.buckets.items()]
        return ", ".join(text if start == 1 else f"from {start} on {text}" for start, text in parts)

    def begin_rollout(self, requests: int) -> int:
        """Always drafts from the first step."""
        return 0

    def select(self, running: int) -> DraftPlan:
        """An untried plan of the batch size, else the choice of the rule."""
        plans = self.choices(running)
        if len(plans) == 1:
            return plans[0]
        earned = self._earned.get(bucket_of(running), {})
        for plan in plans:
            if not earned.get(plan):
                return plan
        return self._rule.pick({plan: earned[plan] for plan in plans}, self._rng)

    def choices(self, running: int) -> Sequence[DraftPlan]:
        """The plans of the batch size, or OFF alone beyond the threshold."""
        if self._threshold is not None and running > self._threshold:
            return (OFF,)
        return self.buckets[self._starts[bisect_right(self._starts, running) - 1]]

    def record(self, step: StepRecord) -> None:
        """Add the reward of a step, unless it had extra work."""
        if not step.steady or step.seconds <= 0:
            return
        earned = self._earned.setdefault(bucket_of(step.running), {})
        rewards = earned.setdefault(step.plan, deque(maxlen=self._window))
        rewards.append((step.running + sum(step.accepted)) / step.seconds)

    def changed(self, *, drafter: bool = False) -> None:
        """Drop the older half of the rewards."""
        for earned in self._earned.values():
            for rewards in earned.values():
                for _ in range(len(rewards) - math.ceil(_KEPT_ON_CHANGE * len(rewards))):
                    rewards.popleft()


def buckets_by_rows(
    plans: Sequence[DraftPlan], thresholds: Sequence[int]
) -> dict[int, list[DraftPlan]]:
    """The buckets of BEG: plans with the same `verify_tokens` form a bucket, which applies from its
    threshold up to the next one. The largest `verify_tokens` applies to the smallest batches.

    Raises ConfigError if there is not one threshold for each value of `verify_tokens`, or if the
    thresholds do not increase from 1.
    """
    by_rows = sorted(dict.fromkeys(plans), key=lambda plan: -plan.verify_tokens)
    groups = [list(group) for _, group in groupby(by_rows, key=lambda plan: plan.verify_tokens)]
    shown = ", ".join(str(group[0].verify_tokens) for group in groups)
    if len(thresholds) != len(groups):
        raise ConfigError(
            f"{len(thresholds)} thresholds ({', '.join(map(str, thresholds))}) do not match plans "
            f"with verify_tokens {shown}: set {len(groups)} thresholds, one for each of these "
            "values"
        )
    if thresholds[0] != 1 or any(a >= b for a, b in pairwise(thresholds)):
        raise ConfigError(
            f"thresholds {', '.join(map(str, thresholds))} must start at 1 and increase"
        )
    return dict(zip(thresholds, groups, strict=True))
