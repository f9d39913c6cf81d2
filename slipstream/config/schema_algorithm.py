"""Options of `algorithm`: from scored responses to what the update sees.

Knows names, types and defaults only; `validate_algorithm` holds the rules between options. Part of
the tree in `schema`, which is what other modules import.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.config.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from slipstream.config.schema_actor import KLEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCtrlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient, or steer it towards `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """Coefficient, or its first value."""
    horizon: PositiveInt = 10000
    """Samples over which `adaptive` corrects."""
    target_kl: PositiveFloat = 0.1
    """KL that `adaptive` aims at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PFPPOConfig:
    """Resampling of a batch's responses by their scores (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Odds of a response: a power of its absolute score; 1 for the best and the worst and 0 for
    all others; or 0.4 for the best and 0.1 for all others."""
    weight_pow: NonNegativeFloat = 2.0
    """Exponent of `pow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): only groups whose responses differ in reward are trained on."""

    enable: bool = False
    """Replace groups without a difference by those of other prompts."""
    metric: str | None = None
    """What has to differ: `score` (`seq_reward`, `seq_final_reward`), or a named part of the
    reward, such as `acc`; null: `score`."""
    max_num_gen_batches: NonNegativeInt = 0
    """Prompts to try for one batch, in batches; when they are used up the run ends with an error.
    0: without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Updates from rollouts of another law than the trained policy's: another engine, older
    weights, or a truncated sampler."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights in the loss: of each token, or of whole responses; null: none."""
    rollout_is_threshold: PositiveFloat | str = 2.0
    """Weights above are cut down to it. "low_high" (icepop): weights outside become 0."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the batch."""
    rollout_rs: tuple[str, ...] | None = None
    """Reject tokens or responses too far from the policy: `token_k1`, `seq_mean_k3` and others, one
    or a list; null: none."""
    rollout_rs_threshold: PositiveFloat | str | tuple[PositiveFloat | str, ...] | None = None
    """Bounds of `rollout_rs`: one for all, or a list of one each; "low_high", or the upper one."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Lower bound beside a single upper one; null: its reciprocal."""
    rollout_token_veto_threshold: Fraction | None = None
    """A token whose ratio is below removes its whole response; null: none does."""
    bypass_mode: bool = False
    """Take the rollout's log-probs for the old policy's, without a forward pass for them, and
    correct inside the loss."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss in `bypass_mode`: PPO's, whose ratio is then the importance weight, or REINFORCE."""
    support_replay: bool = False
    """Where `rollout.top_p`, `top_k` or `min_p` cut the policy's distribution: take all log-probs,
    the rollout's, the old, the new and the reference's, over the tokens that were kept. Ratios are
    else biased, for tokens are drawn from what is left."""
    preset: str | None = None
    """All of these at once, by name, such as `decoupled_token_is` or `bypass_ppo_clip`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator."""
    gamma: Fraction = 1.0
    """Discount per token, of the estimators that discount."""
    lam: Fraction = 1.0
    """Lambda of generalised advantages (`gae`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO."""
    gdpo_reward_keys: tuple[str, ...] | None = None
    """Parts of the reward that `gdpo` normalises each by itself."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """Their weights, one each; null: 1."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KLEstimator = "kl"
    """Estimator of the penalty, from the sampled tokens or (`full`) exact, over the whole
    vocabulary."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Coefficient of the penalty."""
    use_pf_ppo: bool = False
    """Resample the responses of each batch by their scores before the update."""
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    """Resampling of a batch's responses by their scores (PF-PPO)."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling (DAPO): only groups whose responses differ in reward are trained on."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Updates from rollouts of another law than the trained policy's."""
