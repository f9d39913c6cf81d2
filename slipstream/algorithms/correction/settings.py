"""Settings of rollout correction under VERL's key names, and its named presets.

Everything that a setting can get wrong is found here, when the run is configured. Knows nothing
about tensors.
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
"""What `rollout_rs` may name; the first three are the spellings of VERL up to 0.7."""

_GEO = "0.999_1.001"
_K3 = 0.01


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Weights above `high` become `high`; with `low` (icepop) those outside become 0 instead."""

    low: float | None
    high: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """Keep what has `low <= statistic <= high`, both in the statistic's own units: log-ratios for
    `ratio` and `k1`. `name` is the option as it was written."""

    name: str
    level: RsLevel
    statistic: RsStatistic
    low: float
    high: float


USUAL_THRESHOLD = 2.0
"""VERL's bound of importance weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """How updates account for rollouts drawn from another law than the trained policy's.

    With rho = old_log_prob - rollout_log_prob per token:

    - `rollout_is`: weights e^rho per `token`, e^(sum rho) per `sequence`, or None.
    - `rollout_is_threshold`: a number truncates weights from above; "low_high" (icepop) makes those
      outside 0.
    - `rollout_is_batch_normalize`: weights are divided by their mean over the batch.
    - `rollout_rs`: comma-separated names of `RS_OPTIONS`; all must keep a token for it to stay.
    - `rollout_rs_threshold`: one entry for all options, or one each, comma-separated. For ratios
      and `k1` "low_high" or the upper bound alone, whose reciprocal is then the lower one; `k1` is
      -rho, so its bounds are of the rollout's probability over the trainer's. For `k2` and `k3` an
      upper bound.
    - `rollout_rs_threshold_lower`: the lower bound beside a single upper one.
    - `rollout_token_veto_threshold`: a token with e^rho below it removes its whole sequence.
    - `bypass_mode`: the rollout's log-probs serve as old ones, without a forward pass; the loss
      `bypass_mode` then corrects from the present policy. `loss_type`: its objective there,
      `ppo_clip` (whose own ratio is the importance weight) or `reinforce`.

    Raises:
        ValueError: a value that cannot work, or a setting without effect; with its key.

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
        # Reading the bounds checks them.
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
            raise _bad("loss_type", self.loss_type, "bypass_mode=true, whose loss it chooses")
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise _bad(
                "rollout_is",
                self.rollout_is,
                "loss_type=reinforce, or rollout_is=null: in bypass_mode the ratio of ppo_clip is "
                "the importance weight already",
            )

    @property
    def enabled(self) -> bool:
        """Whether anything but metrics comes out."""
        return (
            self.rollout_is is not None
            or self.rollout_rs is not None
            or self.rollout_token_veto_threshold is not None
        )

    @property
    def weight_bounds(self) -> WeightBounds:
        """`rollout_is_threshold`, read."""
        key, value = "rollout_is_threshold", self.rollout_is_threshold
        low, high = _interval(key, value)
        if not 0 < high < math.inf or (low is not None and not 0 <= low < high):
            raise _bad(key, value, 'a positive number, or "low_high" with 0 <= low < high')
        return WeightBounds(low, high)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """`rollout_rs` and its thresholds, read."""
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
                "rollout_rs_threshold_lower", floor, f'one lower bound: {key}="{threshold}" has one'
            )
        low = floor if low is None else low
        if statistic in ("k2", "k3"):
            if low is not None or not 0 < high < math.inf:
                raise _bad(key, threshold, f"for {name} one positive number, its upper bound")
            return Rejection(name, level, statistic, -math.inf, high)
        if not 0 < high < math.inf or (low is not None and not 0 < low <= high):
            raise _bad(key, threshold, f"for {name} 0 < low <= high")
        low = 1 / high if low is None else low
        if low > high:
            raise _bad(key, threshold, f'for {name} an upper bound of at least 1, or "low_high"')
        return Rejection(name, level, statistic, math.log(low), math.log(high))

    @classmethod
    def preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset of that name with its usual thresholds.

        Raises:
            ValueError: no such preset; the message has the nearest and all names.
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
        """Metrics alone."""
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
        """Weights per sequence, and rejection by their size."""
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
        """PPO against the rollout policy: its ratio is the importance weight."""
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
"""Names that `RolloutCorrectionConfig.preset` takes."""


def _interval(key: str, value: float | str) -> tuple[float | None, float]:
    """`low_high` as two numbers, anything else as an upper bound alone."""
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


def _bad(key: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"algorithm.rollout_correction.{key}={value}: needs {wanted}")
