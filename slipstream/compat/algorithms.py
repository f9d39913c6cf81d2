"""verl's loss, advantage and KL functions under verl's names.

Each one calls a function of `slipstream.algorithms`. The registries are shared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.algorithms import (
    AdvantageEstimator,
    KLController,
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
from slipstream.algorithms import apply_kl_penalty as subtract_kl_penalty
from slipstream.algorithms.registry import registered_name
from slipstream.compat.rewards import DataProto

__all__ = [
    "AdvantageEstimator",
    "advantage_estimation",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_advantages",
    "compute_gae_advantage_return",
    "compute_kl_penalty",
    "compute_policy_loss",
    "compute_ppo_loss",
    "compute_response_mask",
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
    """Return the policy loss of a whole mini-batch, and its metrics. All tensors are (B, T).

    `config` is `actor_rollout_ref.actor` (`clip_ratio`, `clip_ratio_c`, `loss_agg_mode`,
    `policy_loss.loss_mode` ...) as an object or a mapping. None: PPO's clipped objective with
    verl's defaults.

    Raises:
        RegistryError: `policy_loss.loss_mode` names no registered loss.
        ValueError: shapes differ, or no token is a target.
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
    """Return the KL estimate of each token, in the shape of the inputs. `kl_penalty` has types."""
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
    """Return `data` with `advantages` and `returns` (B, T) added.

    Reads `token_level_rewards` (else `token_level_scores`), `response_mask`, `uid`, and `values` if
    the estimator needs them. `num_repeat` is part of verl's signature and unused: the rows of a
    group share one `uid`. Raises ValueError if `uid` is missing, except for GAE.
    """
    if "uid" not in data.non_tensor_batch and registered_name(adv_estimator) != "gae":
        raise ValueError(
            f"{adv_estimator} compares responses to the same prompt; set "
            "non_tensor_batch['uid'] to the same value for all rows of one prompt"
        )
    batch = data.batch
    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    rewards = "token_level_rewards" if "token_level_rewards" in batch else "token_level_scores"
    inputs: dict[str, Any] = {
        "token_level_rewards": batch[rewards],
        "response_mask": batch["response_mask"],
        "index": data.non_tensor_batch.get("uid"),
        "config": settings if config is None else config,
    }
    inputs |= {k: batch[k] for k in ("values", "reward_baselines", "old_log_probs") if k in batch}
    advantages, returns = get_adv_estimator_fn(adv_estimator)(**inputs)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


compute_advantages = compute_advantage


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Return `data` with `token_level_rewards` (B, T), the scores minus a KL penalty, and metrics.

    Reads `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`, which is added
    if it is missing. The controller is updated. Raises ValueError for an unknown kind of penalty.
    """
    batch = data.batch
    if "response_mask" not in batch:
        batch["response_mask"] = compute_response_mask(data)
    batch["token_level_rewards"], metrics = subtract_kl_penalty(
        batch["token_level_scores"],
        batch["old_log_probs"],
        batch["ref_log_prob"],
        batch["response_mask"],
        kl_ctrl=kl_ctrl,
        kl_penalty_kind=kl_penalty,
    )
    return data, metrics


def compute_response_mask(data: DataProto) -> Tensor:
    """Return the attention mask (B, R) of the responses."""
    mask: Tensor = data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]
    return mask


def _setting(config: Any, key: str) -> Any:
    if config is None:
        return None
    return config.get(key) if hasattr(config, "get") else getattr(config, key, None)
