"""Settings of the RL loop, as `loops.rl` and `loops.learner` read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.algorithms import AdvantageConfig, PFPPOConfig, RolloutCorrectionConfig
from slipstream.errors import check_at_least_one
from slipstream.training.losses import LossFn, policy_loss_fn
from slipstream.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RLTrainingConfig:
    """One RL run. `mini_batch_size` counts prompts per optimizer step; None is the whole batch.

    `sync_every` is in steps; `start_step` the number of steps done already (resume). `shuffle` is
    the seed of the order of groups in mini-batches, None keeps their order; the critic has its own
    of each. The two lengths are the
    rollout's limits, for metrics. A step without any sample to train on is left out; after
    `max_skipped_batches` such in a row the run ends. With `baseline`, advantages are reward -
    `baseline` and `adv_estimator` has no part in them. Every `checkpoint_every` steps, and at the
    end, the loop calls `save`. `noise_seed` is that of rollouts whose engine is exact and takes
    keyed noise, `seed` that of other draws. `select` chooses tokens over a mini-batch for the loss
    (`algorithms.policy_loss_selection`, its config bound). `pf_ppo` resamples
    the rows of each batch. `replay` has the cuts of a truncating sampler,
    over whose support all log-probs are then taken. `correction` None: the rollout's law is
    taken for the policy's. Before step `critic_warmup` only the critic learns.
    With `compared`, a sample whose group has no other is left out.
    """

    num_steps: int
    max_prompt_length: int
    max_response_length: int
    loss: LossFn = field(default_factory=policy_loss_fn)
    select: Callable[..., Tensor] | None = None
    adv_estimator: str = "grpo"
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: RolloutCorrectionConfig | None = None
    pf_ppo: PFPPOConfig | None = None
    replay: SamplingParams | None = None
    compared: bool = True
    baseline: float | None = None
    temperature: float = 1.0
    mini_batch_size: int | None = None
    ppo_epochs: int = 1
    critic_mini_batch_size: int | None = None
    critic_epochs: int = 1
    critic_warmup: int = 0
    shuffle: str | None = None
    critic_shuffle: str | None = None
    sync_every: int = 1
    start_step: int = 0
    log_every: int = 1
    flat_reward_warning: int = 10
    max_skipped_batches: int = 3
    checkpoint_every: int = 1
    noise_seed: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "sync_every", "log_every", "checkpoint_every", "ppo_epochs", "critic_epochs"
        )

    @property
    def on_policy(self) -> bool:
        """One optimizer step per batch: the policy that samples is the policy that is updated."""
        return self.mini_batch_size is None and self.ppo_epochs == 1 and self.sync_every == 1
