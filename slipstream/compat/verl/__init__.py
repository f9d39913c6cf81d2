"""verl's package `verl`, for code written for verl: replace `verl` by `slipstream.compat.verl`.

`docs/from_verl.md` lists the differences.
"""

from slipstream.compat.algorithms import (
    AdvantageEstimator,
    advantage_estimation,
    agg_loss,
    compute_advantage,
    compute_advantages,
    compute_gae_advantage_return,
    compute_kl_penalty,
    compute_policy_loss,
    compute_ppo_loss,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)
from slipstream.compat.data import create_rl_dataset, create_rl_sampler
from slipstream.compat.managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from slipstream.compat.rewards import (
    DataProto,
    DataProtoItem,
    compute_reward,
    compute_reward_async,
    default_compute_score,
    get_custom_reward_fn,
    load_reward_manager,
)
from slipstream.compat.trainer import RayPPOTrainer
from slipstream.data.rlhf_dataset import (
    AbstractDataGenerator,
    DynamicGenDataset,
    RLHFDataset,
    collate_fn,
)
from slipstream.data.samplers import AbstractCurriculumSampler, AbstractSampler
from slipstream.data.sft_dataset import MultiTurnSFTDataset

__all__ = [
    "AbstractCurriculumSampler",
    "AbstractDataGenerator",
    "AbstractSampler",
    "AdvantageEstimator",
    "BatchRewardManager",
    "DAPORewardManager",
    "DataProto",
    "DataProtoItem",
    "DynamicGenDataset",
    "MultiTurnSFTDataset",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RLHFDataset",
    "RayPPOTrainer",
    "advantage_estimation",
    "agg_loss",
    "collate_fn",
    "compute_advantage",
    "compute_advantages",
    "compute_gae_advantage_return",
    "compute_kl_penalty",
    "compute_policy_loss",
    "compute_ppo_loss",
    "compute_reward",
    "compute_reward_async",
    "create_rl_dataset",
    "create_rl_sampler",
    "default_compute_score",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "get_custom_reward_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "load_reward_manager",
    "register_adv_est",
    "register_policy_loss",
]
