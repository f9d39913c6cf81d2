"""Settings of rollout correction with VERL's keys, and its presets.

All settings are checked here, when the run is configured.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Literal, cast

RsLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]
RsStatistic = Literal["ratio", "k1", "k2", "k3"]

RS_OPTIONS: dict[str, tuple[RsLevel, RsStatistic]] = {
    "token": ("token", "ratio"),
    "sequence": ("seq_sum", "ratio"),
    "geometric": ("seq_mean", "ratio"),
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("seq_sum", "k1"),
    "seq_sum_k2": ("seq_sum", "k2"),
    "seq_sum_k3": ("seq_sum", "k3"),
    "seq_mean_k1": ("seq_mean", "k1"),
    "seq_mean_k2": ("seq_mean", "k2"),
    "seq_mean_k3": ("seq_mean", "k3"),
    "seq_max_k2": ("seq_max", "k2"),
    "seq_max_k3": ("seq_max", "k3"),
}
"""Valid names in `rollout_rs`. The first three are spellings of VERL up to 0.7."""

_GEO = "0.999_1.001"
_K3 = 0.01


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Bounds of importance weights: weights above `high` become `high`. With `low` (icepop) weights
    outside the bounds become 0 instead."""

    low: float | None
    high: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule that keeps tokens with `low <= statistic <= high`. The bounds have the statistic's
    units: log-ratios for `ratio` and `k1`. `name` is the option in `rollout_rs`."""

    name: str
    level: RsLevel
    statistic: RsStatistic
    low: float
    high: float


USUAL_THRESHOLD = 2.0
"""VERL's upper bound of importance weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Settings of the correction for rollouts sampled from another distribution than the policy's.

    With rho = old_log_prob - rollout_log_prob per token:

    - `rollout_is`: importance weights e^rho per `token`, e^(sum rho) per `sequence`, or None.
    - `rollout_is_threshold`: a number truncates larger weights; "low_high" (icepop) sets weights
      outside to 0.
    - `rollout_is_batch_normalize`: divides the weights by their mean over the batch.
    - `rollout_rs`: comma-separated names of `RS_OPTIONS`. A token stays if all of them keep it.
    - `rollout_rs_threshold`: one entry for all options, or one for each, comma-separated. For
      ratios and `k1` it is "low_high", or an upper bound whose reciprocal is the lower bound. `k1`
      is -rho, so its bounds apply to the rollout's probability over the trainer's. For `k2` and
      `k3` it is an upper bound.
    - `rollout_rs_threshold_lower`: the lower bound, if `rollout_rs_threshold` is an upper bound.
    - `rollout_token_veto_threshold`: a token with e^rho below this removes its whole sequence.
    - `bypass_mode`: uses the rollout's log-probs as old log-probs, without a forward pass. The loss
      `bypass_mode` then corrects with the current policy. `loss_type` is its objective: `ppo_clip`,
      whose ratio is the importance weight, or `reinforce`.

    Raises:
        ValueError: a value is impossible, or a setting has no effect; the message names the key.

    Source: https://richardli.xyz/rl-collapse; icepop: https://ringtech.notion.site/icepop.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = USUAL_THRESHOLD
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, "token", "sequence"):
            raise _bad("rollout_is", self.rollout_is, "one of token, sequence, null")
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise _bad("loss_type", self.loss_type, "one of ppo_clip, reinforce")
        veto = self.rollout_token_veto_threshold
        if veto is not None and not 0 < veto < 1:
            raise _bad(
                "rollout_token_veto_threshold", veto, "a ratio between 0 and 1, such as 1e-4"
            )
        # These properties check the bounds.
        _ = self.weight_bounds, self.rejections
        self._check_effects()

    def _check_effects(self) -> None:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise _bad(
                "rollout_is_batch_normalize", True, "rollout_is, whose weights it normalizes"
            )
        if self.rollout_is is None and self.rollout_is_threshold != USUAL_THRESHOLD:
            raise _bad(
                "rollout_is_threshold",
                self.rollout_is_threshold,
                "rollout_is, whose weights it bounds",
            )
        if self.loss_type != "ppo_clip" and not self.bypass_mode:
            raise _bad("loss_type", self.loss_type, "bypass_mode=true, whose objective it sets")
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise _bad(
                "rollout_is",
                self.rollout_is,
                "loss_type=reinforce, or rollout_is=null, because in bypass_mode the ratio of "
                "ppo_clip is already the importance weight",
            )

    @property
    def enabled(self) -> bool:
        """Whether the correction changes weights or the mask, and not only reports metrics."""
        return (
            self.rollout_is is not None
            or self.rollout_rs is not None
            or self.rollout_token_veto_threshold is not None
        )

    @property
    def weight_bounds(self) -> WeightBounds:
        """The bounds parsed from `rollout_is_threshold`."""
        key, value = "rollout_is_threshold", self.rollout_is_threshold
        low, high = _interval(key, value)
        if not 0 < high < math.inf or (low is not None and not 0 <= low < high):
            raise _bad(key, value, 'a positive number, or "low_high" with 0 <= low < high')
        return WeightBounds(low, high)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules parsed from `rollout_rs` and its thresholds."""
        if self.rollout_rs is None:
            for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
                if getattr(self, key) is not None:
                    raise _bad(key, getattr(self, key), "rollout_rs, whose threshold it is")
            return ()
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if self.rollout_rs_threshold is None:
            raise _bad(
                "rollout_rs",
                self.rollout_rs,
                'rollout_rs_threshold, such as "0.5_2.0" for ratios and k1 or 0.01 for k3',
            )
        given = str(self.rollout_rs_threshold).split(",")
        if len(given) not in (1, len(names)) or len(set(names)) < len(names):
            raise _bad(
                "rollout_rs_threshold",
                self.rollout_rs_threshold,
                f"one entry, or one for each of {len(names)} different options "
                f"(rollout_rs={self.rollout_rs})",
            )
        thresholds = given * len(names) if len(given) == 1 else given
        return tuple(map(self._rejection, names, thresholds))

    def _rejection(self, name: str, threshold: str) -> Rejection:
        if name not in RS_OPTIONS:
            near = difflib.get_close_matches(name, RS_OPTIONS, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise _bad("rollout_rs", f"{name}{meant}", f"some of {', '.join(RS_OPTIONS)}")
        level, statistic = RS_OPTIONS[name]
        key, floor = "rollout_rs_threshold", self.rollout_rs_threshold_lower
        low, high = _interval(key, threshold)
        if low is not None and floor is not None:
            raise _bad(
                "rollout_rs_threshold_lower",
                floor,
                f'to be null, because {key}="{threshold}" already has a lower bound',
            )
        low = floor if low is None else low
        if statistic in ("k2", "k3"):
            if low is not None or not 0 < high < math.inf:
                raise _bad(key, threshold, f"one positive number for {name}, its upper bound")
            return Rejection(name, level, statistic, -math.inf, high)
        if not 0 < high < math.inf or (low is not None and not 0 < low <= high):
            raise _bad(key, threshold, f"0 < low <= high for {name}")
        low = 1 / high if low is None else low
        if low > high:
            raise _bad(key, threshold, f'an upper bound of at least 1 for {name}, or "low_high"')
        return Rejection(name, level, statistic, math.log(low), math.log(high))

    @classmethod
    def preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset of this name with its default thresholds.

        Raises:
            ValueError: there is no such preset; the message has the nearest name and all names.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"unknown rollout correction preset {name!r}{meant}; known: {', '.join(PRESETS)}"
            )
        return cast(RolloutCorrectionConfig, getattr(cls, name)())

    @classmethod
    def disabled(cls) -> RolloutCorrectionConfig:
        """No correction, only metrics."""
        return cls()

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated weights per token."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated weights per sequence."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(
        cls, threshold: float = 5.0, threshold_lower: float = 0.5
    ) -> RolloutCorrectionConfig:
        """Weights per token, 0 outside the bounds."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.5_2.0"
    ) -> RolloutCorrectionConfig:
        """Truncated weights per sequence, and rejection of sequences by their ratio."""
        return cls(
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_sum_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: float | str = _GEO) -> RolloutCorrectionConfig:
        """Rejection by the geometric mean of token ratios."""
        return cls(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO
    ) -> RolloutCorrectionConfig:
        """`decoupled_geo_rs` with truncated weights per token."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO
    ) -> RolloutCorrectionConfig:
        """`decoupled_geo_rs` with truncated weights per sequence."""
        return cls(
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = _K3) -> RolloutCorrectionConfig:
        """Rejection by the sequence's mean k3."""
        return cls(rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = _K3
    ) -> RolloutCorrectionConfig:
        """`decoupled_k3_rs` with truncated weights per token."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k3",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = _K3
    ) -> RolloutCorrectionConfig:
        """`decoupled_k3_rs` with truncated weights per sequence."""
        return cls(
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k3",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_ppo_clip(cls) -> RolloutCorrectionConfig:
        """PPO with the rollout's policy as the old policy; its ratio is the importance weight."""
        return cls(bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: float | str = _GEO) -> RolloutCorrectionConfig:
        """`bypass_ppo_clip` with rejection by the geometric mean."""
        return cls(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = _K3) -> RolloutCorrectionConfig:
        """`bypass_ppo_clip` with rejection by the sequence's mean k3."""
        return cls(bypass_mode=True, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """REINFORCE with truncated weights per sequence."""
        return cls(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is="sequence",
            rollout_is_threshold=threshold,
        )

    @classmethod
    def bypass_pg_token_icepop(
        cls, threshold: float = 5.0, threshold_lower: float = 0.5
    ) -> RolloutCorrectionConfig:
        """REINFORCE with weights per token, 0 outside the bounds."""
        return cls(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is="token",
            rollout_is_threshold=f"{threshold_lower}_{threshold}",
        )

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: float | str = _GEO) -> RolloutCorrectionConfig:
        """REINFORCE with rejection by the geometric mean."""
        return cls(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO
    ) -> RolloutCorrectionConfig:
        """`bypass_pg_geo_rs` with truncated weights per token."""
        return cls(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO
    ) -> RolloutCorrectionConfig:
        """`bypass_pg_geo_rs` with truncated weights per sequence."""
        return cls(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )


PRESETS = (
    "disabled",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis",
)
"""The names of `RolloutCorrectionConfig.preset`."""


def _interval(key: str, value: float | str) -> tuple[float | None, float]:
    """Parse "low_high" to (low, high), and a single number to (None, high)."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    match numbers:
        case [high]:
            return None, high
        case [low, high]:
            return low, high
    raise _bad(key, value, 'a number or "low_high", such as 2.0 or "0.5_5.0"')


def _bad(key: str, value: object, need: str) -> ValueError:
    return ValueError(f"algorithm.rollout_correction.{key}={value}: needs {need}")
