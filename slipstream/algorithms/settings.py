"""What advantage estimators and policy losses read from their `config` argument.

Attribute names are VERL's, so functions written for VERL read them unchanged, and any object with
the same attributes may stand in. The loop's wiring fills these from the run's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.algorithms.aggregation import Normalizers


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Settings of the group-relative estimators.

    `norm_adv_by_std_in_grpo` divides by the group's standard deviation (GRPO); without it the
    advantage is the centred score (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """

    norm_adv_by_std_in_grpo: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Settings of the policy losses.

    `clip_ratio_low` and `clip_ratio_high` bound the probability ratio to `[1 - low, 1 + high]`;
    None means `clip_ratio`. `clip_ratio_c` is the dual-clip bound for negative advantages.
    `loss_scale_factor` is the horizon of `seq-mean-token-sum-norm` where no `normalizers` are
    given. `normalizers` are the counts of the whole mini-batch; None says that the rows of one
    call are the whole mini-batch.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_scale_factor: float | None = None
    normalizers: Normalizers | None = None

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        if self.clip_ratio_c <= 1:
            raise ValueError(
                f"clip_ratio_c must be > 1 (the dual clip bounds the loss at -A * clip_ratio_c), "
                f"got {self.clip_ratio_c}; the usual value is 3.0"
            )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Smallest and largest unclipped probability ratio."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - low, 1.0 + high
