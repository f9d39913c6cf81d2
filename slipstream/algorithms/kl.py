"""KL between two policies, estimated on sampled tokens, and controllers of its coefficient.

The estimators of KL(policy || reference) use the log-probs of tokens that the policy sampled
(http://joschu.net/blog/kl-approx.html). For a KL in the loss, the trainer aggregates `kl_penalty`.
For a KL in the reward, `apply_kl_penalty` subtracts the estimate from token scores, and
`subtract_kl` subtracts a KL that was computed in another way (`full_kl`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import masked_sum, zero_masked

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names of estimators. Each may have the suffix `+`."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token KL estimates of the kind `kl_penalty`, in the shape of the inputs. With d =
    logprob - ref_logprob:

    - `kl`, `k1`: d. Unbiased; as a loss its expected gradient is 0.
    - `abs`: |d|.
    - `mse`, `k2`: d^2 / 2. The value is biased; the expected gradient is that of the KL.
    - `low_var_kl`, `k3`: e^-d - 1 + d, with the exponent clamped to +-20 and the value to +-10.
      Unbiased and never negative.
    - with `+` (`k1+`, `k3+`, ...): the value of that estimator with k2's gradient
      (straight-through).

    Raises:
        ValueError: the kind is unknown, or it is `full` or `full_forward`, which cannot be computed
            from sampled tokens (`full_kl` computes them).
    """
    named = kl_penalty.removesuffix("+")
    if named != kl_penalty and not named.endswith("+"):
        value = _estimate(logprob, ref_logprob, named)
        surrogate = _estimate(logprob, ref_logprob, "k2")
        return value.detach() + (surrogate - surrogate.detach())
    return _estimate(logprob, ref_logprob, kl_penalty)


def _estimate(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    match kind:
        case "kl" | "k1":
            return logprob - ref_logprob
        case "abs":
            return (logprob - ref_logprob).abs()
        case "mse" | "k2":
            return 0.5 * (logprob - ref_logprob).square()
        case "low_var_kl" | "k3":
            log_ratio = (ref_logprob - logprob).clamp(-20.0, 20.0)
            return (log_ratio.exp() - log_ratio - 1).clamp(-10.0, 10.0)
        case "full" | "full_forward":
            raise ValueError(
                f"kl penalty {kind!r} sums over the full vocabulary and needs both policies' "
                f"hidden states, but kl_penalty() has only log-probs of sampled tokens; set "
                f"actor_rollout_ref.actor.kl_loss_type={kind} or algorithm.kl_penalty={kind}, or "
                f"in code use chunked_full_kl, 'k3' (low_var_kl) or 'k3+'"
            )
    raise ValueError(
        f"unknown kl penalty {kind!r}; known: {', '.join(KL_KINDS)}, each also with a '+' suffix"
    )


class KLController(Protocol):
    """Controls the coefficient `value` of a KL penalty. `value` is its whole state."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update `value` from a KL that was measured on `n_steps` sequences."""
        ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Moves the KL towards a target: value *= 1 + clip(kl / target - 1, +-0.2) * n_steps / horizon.

    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if not (target_kl > 0 and horizon > 0):
            raise ValueError(
                f"an adaptive KL controller needs target_kl > 0 and horizon > 0, "
                f"got target_kl={target_kl}, horizon={horizon}"
            )
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raise `value` if the KL is above the target, and lower it if the KL is below.

        Raises:
            ValueError: `n_steps` is so large that the coefficient could become negative.
        """
        if n_steps >= 5 * self.horizon:
            raise ValueError(
                f"{n_steps} sequences in one step could turn the KL coefficient negative with "
                f"horizon={self.horizon:g}; set the horizon above {n_steps / 5:g} (10000 is usual)"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000
) -> KLController:
    """Make the controller of `algorithm.kl_ctrl`, of kind `fixed` or `adaptive`.

    Raises:
        ValueError: the kind is unknown, or the target or horizon is not positive.
    """
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ValueError(f"unknown KL controller {kind!r}; known: fixed, adaptive")


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    kl_ctrl: KLController,
    kl_penalty_kind: str = "kl",
) -> tuple[Tensor, dict[str, float]]:
    """In-reward KL from log-probs of sampled tokens. It is `subtract_kl` with
    `kl_penalty(old_log_probs, ref_log_probs, kl_penalty_kind)`. All tensors are (B, T).

    Raises:
        ValueError: the kind is unknown, or the mask is empty.
    """
    with torch.no_grad():
        kl = kl_penalty(old_log_probs, ref_log_probs, kl_penalty_kind)
    return subtract_kl(token_level_scores, kl, response_mask, kl_ctrl=kl_ctrl)


def subtract_kl(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_ctrl: KLController
) -> tuple[Tensor, dict[str, float]]:
    """In-reward KL: token rewards = scores - beta KL M, with beta from the controller.

    Returns rewards and metrics. All tensors are (B, T). The measured KL is the mean of row means
    over non-empty rows. It is reported, and then the controller is updated with it and B. Call this
    once per batch, with the whole batch.

    Source: InstructGPT, https://arxiv.org/abs/2203.02155, eq. 2.

    Raises:
        ValueError: the mask is empty.
    """
    with torch.no_grad():
        tokens_per_row = response_mask.sum(dim=-1)
        kept = tokens_per_row > 0
        if not bool(kept.any()):
            raise ValueError(
                "in-reward KL over an empty response mask is undefined; skip such batches"
            )
        row_kl = masked_sum(kl, response_mask, dim=-1)[kept] / tokens_per_row[kept]
        current_kl = float(row_kl.mean())
        beta = kl_ctrl.value
        rewards = token_level_scores - beta * zero_masked(kl, response_mask) * response_mask
    kl_ctrl.update(current_kl, n_steps=len(token_level_scores))
    return rewards, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
