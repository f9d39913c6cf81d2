"""VERL's functions of losses, advantages and KL under the names that its guides and users have.

Each is one of `slipstream.algorithms`; the registries are the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms import (
    AdvantageEstimator,
    agg_loss,
    compute_gae_advantage_return,
    compute_policy_loss,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)
from slipstream.algorithms.registry import registered_name
from slipstream.compat.rewards import DataProto

__all__ = [
    "AdvantageEstimator",
    "advantage_estimation",
    "agg_loss",
    "compute_advantage",
    "compute_advantages",
    "compute_gae_advantage_return",
    "compute_kl_penalty",
    "compute_policy_loss",
    "compute_ppo_loss",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

advantage_estimation = estimate_advantages


def compute_ppo_loss(
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss of a whole mini-batch, and its metrics. All tensors are (B, T).

    `config` is `actor_rollout_ref.actor` (`clip_ratio`, `clip_ratio_c`, `loss_agg_mode`,
    `policy_loss.loss_mode` ...) as an object or a mapping; None: PPO's clipped objective by VERL's
    defaults.

    Raises:
        RegistryError: no loss of that mode.
        ValueError: shapes that differ, or no target token.
    """
    mode = _setting(_setting(config, "policy_loss"), "loss_mode") or "vanilla"
    return get_policy_loss_fn(mode)(
        old_log_prob=old_log_probs,
        log_prob=new_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=_setting(config, "loss_agg_mode") or "token-mean",
        config=config,
        rollout_is_weights=None,
    )


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kl_type: str = "kl") -> Tensor:
    """The estimate of the KL of each token, in the shape of the inputs; see `kl_penalty`."""
    return kl_penalty(log_probs, ref_log_probs, kl_type)


def compute_advantage(
    data: DataProto,
    adv_estimator: str | AdvantageEstimator,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """`data` with `advantages` and `returns` (B, T), from `token_level_rewards` (else
    `token_level_scores`), `response_mask`, `uid`, and `values` where the estimator takes them.

    `num_repeat` is VERL's and not needed: groups are rows of one `uid`. Raises ValueError for an
    estimator other than GAE without `uid`.
    """
    if "uid" not in data.non_tensor_batch and registered_name(adv_estimator) != "gae":
        raise ValueError(
            f"{adv_estimator} compares the responses to a prompt: non_tensor_batch['uid'] must say "
            "which rows have the same one"
        )
    batch = data.batch
    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    rewards = "token_level_rewards" if "token_level_rewards" in batch else "token_level_scores"
    asked: dict[str, Any] = {
        "token_level_rewards": batch[rewards],
        "response_mask": batch["response_mask"],
        "index": data.non_tensor_batch.get("uid"),
        "config": settings if config is None else config,
    }
    asked |= {k: batch[k] for k in ("values", "reward_baselines", "old_log_probs") if k in batch}
    advantages, returns = get_adv_estimator_fn(adv_estimator)(**asked)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


compute_advantages = compute_advantage


def _setting(config: Any, key: str) -> Any:
    if config is None:
        return None
    return config.get(key) if hasattr(config, "get") else getattr(config, key, None)
