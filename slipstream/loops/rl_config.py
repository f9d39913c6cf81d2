"""Settings of the RL loop, read by `loops.rl` and `loops.learner`."""

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
    """Settings of one RL run.

    - `num_steps`, `start_step`: the last step, and the number of steps already done (resume).
    - `max_prompt_length`, `max_response_length`: limits of the rollout in tokens, for metrics.
    - `loss`, `select`: the policy loss; `select` chooses the tokens of a mini-batch that the loss
      uses (`algorithms.policy_loss_selection` with its config bound).
    - `adv_estimator`, `advantages`: the advantage estimator and its settings. With `baseline`,
      advantages are reward - `baseline` instead.
    - `correction`: rollout correction; None treats the rollout's policy as the trained policy.
    - `pf_ppo`: resamples the rows of each batch.
    - `replay`: the truncation of the sampler (top-k, top-p, min-p). All log-probs are then taken
      over its support.
    - `compared`: leave out a sample if all others of its group are left out.
    - `mini_batch_size`: prompts per optimizer step; None is the whole batch. `ppo_epochs`: passes
      over a batch. `shuffle`: seed for the order of groups in mini-batches; None keeps the order.
      The critic has its own setting of each. Before step `critic_warmup` only the critic learns.
    - `schedule_by_rl_step`, `critic_schedule_by_rl_step`: the learning rate schedule counts RL
      steps instead of optimizer steps.
    - `sync_every`: steps between weight updates of the engines.
    - `max_skipped_batches`: a step without samples to train on is skipped; after this many in a row
      the run ends. It also ends if more than the share `max_failed_share` of the samples of this
      many steps failed.
    - `checkpoint_every`: steps between checkpoints; the last step always saves one.
    - `noise_seed`: seed of the rollouts, if the engine can draft: rows then have noise keys, which
      co-training needs. `seed`: for other draws.
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
    schedule_by_rl_step: bool = False
    critic_schedule_by_rl_step: bool = False
    shuffle: str | None = None
    critic_shuffle: str | None = None
    sync_every: int = 1
    start_step: int = 0
    log_every: int = 1
    flat_reward_warning: int = 10
    max_skipped_batches: int = 3
    max_failed_share: float = 1.0
    checkpoint_every: int = 1
    noise_seed: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "sync_every", "log_every", "checkpoint_every", "ppo_epochs", "critic_epochs"
        )

    @property
    def on_policy(self) -> bool:
        """True if every batch is used for one optimizer step, by the policy that generated it."""
        return self.mini_batch_size is None and self.ppo_epochs == 1 and self.sync_every == 1
