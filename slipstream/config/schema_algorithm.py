"""Options of `algorithm`: how scored responses become the input of an update.

This module has names, types and defaults only; `validate_algorithm` checks rules between options.
Other modules import the tree from `schema`.
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
class KLCtrlSection:
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps the coefficient; `adaptive` adjusts it so that the KL approaches
    `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient; with `adaptive`, its initial value."""
    horizon: PositiveInt = 10000
    """Number of samples over which `adaptive` corrects."""
    target_kl: PositiveFloat = 0.1
    """Target KL for `adaptive`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PFPPOSection:
    """Resampling of a batch's responses by their scores (PF-PPO)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Relative probability of a response. `pow`: a power of its absolute score. `max_min`: 1 for
    the best and the worst, 0 for all others. `max_random`: 0.4 for the best, 0.1 for all others."""
    weight_pow: NonNegativeFloat = 2.0
    """Exponent for `pow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroupsSection:
    """Dynamic sampling (DAPO): train only on groups whose responses differ in reward."""

    enable: bool = False
    """Replace groups without differences by groups of other prompts."""
    metric: str | None = None
    """Value that must differ within a group: `score` (`seq_reward`, `seq_final_reward`), or a named
    part of the reward such as `acc`; null: `score`."""
    max_num_gen_batches: NonNegativeInt = 0
    """Maximum number of batches of prompts to try for one batch. If they do not fill it, the run
    ends with an error. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSection:
    """Correction for rollouts from a policy other than the trained one: another engine, older
    weights, or truncated sampling."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights in the loss, per token or per response (`sequence`); null: none."""
    rollout_is_threshold: PositiveFloat | str = 2.0
    """Larger weights are reduced to this value. "low_high" (icepop): weights outside this interval
    become 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: tuple[str, ...] | None = None
    """Rules that reject tokens or responses too far from the policy: `token_k1`, `seq_mean_k3` and
    others, one or a list; null: none."""
    rollout_rs_threshold: PositiveFloat | str | tuple[PositiveFloat | str, ...] | None = None
    """Bounds for `rollout_rs`: one for all rules, or a list with one per rule. A bound is
    "low_high", or the upper bound."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Lower bound, if `rollout_rs_threshold` is a single upper bound; null: its reciprocal."""
    rollout_token_veto_threshold: Fraction | None = None
    """A token whose ratio is below this value removes its whole response; null: no veto."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old policy's, without a forward pass for them, and correct
    inside the loss."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss in `bypass_mode`: `ppo_clip`, whose ratio is then the importance weight, or
    `reinforce`."""
    support_replay: bool = False
    """For `rollout.top_p`, `top_k` or `min_p`, which sample from a part of the vocabulary: compute
    the rollout, old, new and reference log-probs over the tokens that sampling kept. Without it,
    ratios are biased."""
    preset: str | None = None
    """Name of a preset that sets all of these options, such as `decoupled_token_is` or
    `bypass_ppo_clip`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator."""
    gamma: Fraction = 1.0
    """Discount per token, for estimators that discount."""
    lam: Fraction = 1.0
    """Lambda of generalized advantages (`gae`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the group's standard deviation; off is Dr. GRPO."""
    gdpo_reward_keys: tuple[str, ...] | None = None
    """Parts of the reward that `gdpo` normalizes separately."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """Weights of these parts, one each; null: 1."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the reward."""
    kl_penalty: KLEstimator = "kl"
    """Estimator of the penalty: from the sampled tokens, or exact over the whole vocabulary
    (`full`, `full_forward`)."""
    kl_ctrl: KLCtrlSection = field(default_factory=KLCtrlSection)
    """Coefficient of the KL penalty in the reward."""
    use_pf_ppo: bool = False
    """Resample the responses of each batch by their scores before the update."""
    pf_ppo: PFPPOSection = field(default_factory=PFPPOSection)
    """Resampling of a batch's responses by their scores (PF-PPO)."""
    filter_groups: FilterGroupsSection = field(default_factory=FilterGroupsSection)
    """Dynamic sampling (DAPO): train only on groups whose responses differ in reward."""
    rollout_correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)
    """Correction for rollouts from a policy other than the trained one."""
