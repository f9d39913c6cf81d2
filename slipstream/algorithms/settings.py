"""Settings of advantage estimators and policy losses, their `config` argument.

Attribute names are VERL's, so functions written for VERL can read them. Any object with the same
attributes can be used instead. `build` makes these from the run's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from slipstream.algorithms.aggregation import Normalizers

BYPASS_LOSS_TYPES = ("ppo_clip", "reinforce")
"""Objectives of the loss `bypass_mode`."""

PF_PPO_METHODS = ("pow", "max_min", "max_random")
"""Methods of weighting rows in `pf_ppo_weights`."""


def _read(given: object, names: Iterable[str]) -> dict[str, Any]:
    """The entries of a mapping, or attributes of an object, with these names that are not None."""
    if isinstance(given, Mapping):
        found = {name: given.get(name) for name in names}
    else:
        found = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


class _Readable:
    """Lets VERL's functions read settings as attributes, by key, and with a default."""

    __slots__ = ()

    def get(self, key: str, default: Any = None) -> Any:
        """The setting `key`, or `default` if there is no such setting."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PFPPOConfig(_Readable):
    """Settings of PF-PPO's resampling: `algorithm.pf_ppo.*`.

    `reweight_method` is `pow`, `max_min` or `max_random`. `weight_pow` is the exponent of `pow`.
    """

    reweight_method: str = "pow"
    weight_pow: float = 2.0

    def __post_init__(self) -> None:
        if self.reweight_method not in PF_PPO_METHODS:
            raise ValueError(
                f"pf_ppo.reweight_method must be one of {', '.join(PF_PPO_METHODS)}, got "
                f"{self.reweight_method!r}"
            )
        if not 0 <= self.weight_pow < math.inf:
            raise ValueError(
                f"pf_ppo.weight_pow is the exponent of |score| and must be >= 0, got "
                f"{self.weight_pow}; the usual value is 2.0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(_Readable):
    """Settings of the advantage estimators, from `algorithm.*`.

    `gamma` is the discount per token, `lam` the lambda of GAE. With `norm_adv_by_std_in_grpo` the
    advantage is divided by the group's standard deviation (GRPO); without it, it is the centered
    score (Dr. GRPO, https://arxiv.org/abs/2503.20783). `gdpo_reward_keys` are the components of the
    reward that `gdpo` normalizes separately, `gdpo_reward_weights` their weights (None: 1 each).
    With `use_pf_ppo` the loop resamples its rows with `pf_ppo`; estimators do not read it.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: Sequence[str] = ()
    gdpo_reward_weights: Sequence[float] | None = None
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)

    @classmethod
    def of(cls, given: object) -> AdvantageConfig:
        """Read the settings from an object with attributes or a mapping, as VERL has them. Missing
        settings and settings of None have their defaults; `given` None is all defaults.

        Raises:
            ValueError: a value is impossible.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        return cls(**_read(given, (f.name for f in fields(cls) if f.name != "pf_ppo")))

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(
                    f"algorithm.{name} must be in [0, 1], got {value}; the usual value is 1.0"
                )
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if isinstance(keys, str) or len(set(keys)) != len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_keys must be a list of different names, got {keys!r}"
            )
        if weights is not None and (
            len(weights) != len(keys) or not all(math.isfinite(w) for w in weights)
        ):
            raise ValueError(
                f"algorithm.gdpo_reward_weights={list(weights)} must have one finite number for "
                f"each of algorithm.gdpo_reward_keys={list(keys)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossModeConfig(_Readable):
    """Settings of single loss modes, from `actor_rollout_ref.actor.policy_loss.*`.

    `clip_cov` leaves out the share `clip_cov_ratio` of all target tokens, chosen among tokens with
    a covariance between `clip_cov_lb` and `clip_cov_ub`. `kl_cov` adds a penalty of `ppo_kl_coef`
    times the absolute log-ratio to the share `kl_cov_ratio` of tokens with the highest covariance.
    `dro` needs `dro_beta`. With `gspo_uses_loss_agg_mode`, `gspo` aggregates like other losses.
    `loss_type` is the objective of `bypass_mode`, `ppo_clip` or `reinforce`.
    """

    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    gspo_uses_loss_agg_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(
                    f"policy_loss.{name} is a share of the mini-batch's target tokens and must be "
                    f"in (0, 1], got {value}; the usual value is 0.0002"
                )
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(
                f"policy_loss.clip_cov_lb={self.clip_cov_lb} must be below "
                f"policy_loss.clip_cov_ub={self.clip_cov_ub}; the usual values are 1.0 and 5.0"
            )
        if not self.ppo_kl_coef >= 0:
            raise ValueError(f"policy_loss.ppo_kl_coef must be >= 0, got {self.ppo_kl_coef}")
        if self.dro_beta is not None and not self.dro_beta > 0:
            raise ValueError(f"policy_loss.dro_beta must be > 0, got {self.dro_beta}")
        if self.loss_type not in BYPASS_LOSS_TYPES:
            raise ValueError(
                f"policy_loss.loss_type must be one of {', '.join(BYPASS_LOSS_TYPES)}, got "
                f"{self.loss_type!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig(_Readable):
    """Settings of the policy losses, from `actor_rollout_ref.actor.*`.

    `clip_ratio_low` and `clip_ratio_high` clip the probability ratio to `[1 - low, 1 + high]`; None
    is `clip_ratio`. `clip_ratio_c` is the dual-clip bound for negative advantages, and the
    truncation of the ratio in `dppo_tv` and `dppo_kl`. `tau_pos` and `tau_neg` are the gate
    temperatures of `sapo`. `policy_loss` has the settings of single modes.

    `normalizers` are the counts of the whole mini-batch; None means that the rows of a call are the
    whole mini-batch. `loss_scale_factor` is the horizon of `seq-mean-token-sum-norm` without
    `normalizers`. `selected` (B, T) is the part of these rows in the selection that
    `policy_loss_selection` made over the whole mini-batch. If it is None, the loss selects among
    the rows of the call, which must then be the whole mini-batch.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: PolicyLossModeConfig = field(default_factory=PolicyLossModeConfig)
    loss_scale_factor: float | None = None
    normalizers: Normalizers | None = None
    selected: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, given: object, *, width: int) -> PolicyLossConfig:
        """Read the settings from another object, like `AdvantageConfig.of`. The counts of VERL's
        `global_batch_info` become `normalizers`; without a horizon it is `width`, the T of the
        rows.

        Raises:
            ValueError: a value is impossible.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        found = _read(given, (f.name for f in fields(cls)))
        modes = found.pop("policy_loss", None)
        if not isinstance(modes, PolicyLossModeConfig):
            names = (f.name for f in fields(PolicyLossModeConfig))
            modes = PolicyLossModeConfig(**_read(modes, names))
        counts = _read(given, ["global_batch_info"]).get("global_batch_info") or {}
        tokens, rows = counts.get("batch_num_tokens"), counts.get("global_batch_size")
        if "normalizers" not in found and tokens is not None and rows is not None:
            # VERL multiplies losses by the number of ranks, over which gradients are averaged.
            ranks = counts.get("dp_size") or 1
            horizon = counts.get("loss_scale_factor") or found.get("loss_scale_factor") or width
            found["normalizers"] = Normalizers(
                num_tokens=float(tokens) / ranks,
                num_sequences=float(rows) / ranks,
                horizon=float(horizon),
            )
        return cls(policy_loss=modes, **found)

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(
                    f"{name} must be >= 0, got {value}, because the ratio is clipped to "
                    f"[1 - clip_ratio_low, 1 + clip_ratio_high]; the usual value is 0.2"
                )
        if not self.clip_ratio_c > 1:
            raise ValueError(
                f"clip_ratio_c must be > 1, got {self.clip_ratio_c}, because the dual clip limits "
                f"the loss to -A * clip_ratio_c; the usual value is 3.0"
            )
        for name in ("tau_pos", "tau_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise ValueError(f"loss_scale_factor must be > 0, got {self.loss_scale_factor}")

    @property
    def clip_distances(self) -> tuple[float, float]:
        """(low, high): the distances of the clip bounds from 1. They are also the thresholds of the
        divergence in `dppo_tv` and `dppo_kl`, and of the log-ratio in `geo_mean`."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The smallest and largest probability ratio that is not clipped."""
        low, high = self.clip_distances
        return 1.0 - low, 1.0 + high

    @property
    def global_batch_info(self) -> dict[str, float | int | None]:
        """Keyword arguments of `agg_loss`, as VERL's losses pass them on."""
        if self.normalizers is None:
            return {"loss_scale_factor": self.loss_scale_factor}
        return {
            "dp_size": 1,
            "batch_num_tokens": self.normalizers.num_tokens,
            "global_batch_size": self.normalizers.num_sequences,
            "loss_scale_factor": self.normalizers.horizon,
        }
