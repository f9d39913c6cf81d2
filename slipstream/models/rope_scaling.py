"""RoPE scaling as data: how a checkpoint's rotary frequencies differ from the plain ones.

This module reads `rope_parameters` (transformers 5) and `rope_scaling` (older versions) of a
`config.json`, and writes the contents of both. It knows no tensors; `rope_frequencies` computes the
frequencies. `config` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any, ClassVar

from slipstream.errors import CheckpointError, ConfigError, did_you_mean
from slipstream.reading import shown

DEFAULT_THETA = 10000.0
SPELLINGS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
_MOST_FACTOR = 1_000_000
_OF_EVERY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The base class of all kinds of RoPE scaling."""

    kind: ClassVar[str]
    """The value of `rope_type`."""

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines. It scales attention scores by its square."""
        return 1.0

    def check_model(self, head_dim: int, theta: float) -> None:
        """Raise ConfigError if the scaling does not fit the head width or the base `theta`."""

    def to_hf(self) -> dict[str, Any]:
        """Return the settings as in `rope_parameters`, without the base."""
        settings = {name: value for name, value in asdict(self).items() if value is not None}
        lists = {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
        return {"rope_type": self.kind, **settings, **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Positions are divided by `factor` (Chen et al. 2023)."""

    kind = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling(RopeScaling):
    """NTK-aware scaling that grows with the sequence length beyond `max_position_embeddings`.

    Shorter sequences use the plain frequencies.
    """

    kind = "dynamic"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Low frequencies are divided by `factor`, high ones kept, and others mixed (Llama 3.1)."""

    kind = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        _check_factor(self.factor)
        _check(low > 0, "low_freq_factor", low, "above 0")
        _check(high > low, "high_freq_factor", high, f"above low_freq_factor={low:g}")
        _check_original(self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023).

    Frequencies with fewer than `beta_slow` turns in the original context are divided by `factor`.
    Frequencies with more than `beta_fast` turns are kept, and those in between are mixed. Attention
    scores are scaled up.
    """

    kind = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    """The factor on cosines and sines. None: computed from `factor`, and from `mscale` and
    `mscale_all_dim` if both are set."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the range of mixed frequencies starts and ends at whole indices."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        fast, slow, sharper = self.beta_fast, self.beta_slow, self.attention_factor
        _check(slow > 0, "beta_slow", slow, "above 0")
        _check(fast > slow, "beta_fast", fast, f"above beta_slow={slow:g}")
        _check(sharper is None or sharper > 0, "attention_factor", sharper, "above 0")

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines: `attention_factor`, or YaRN's formula."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def reach(self) -> int:
        """The length in tokens of the context that the scaled frequencies cover."""
        return int(self.factor * self.original_max_position_embeddings)

    def check_model(self, head_dim: int, theta: float) -> None:
        """Raise ConfigError if the base `theta` is at most 1, for which no ramp is defined."""
        if theta <= 1:
            raise ConfigError(f"rope_theta={theta:g} must be above 1 for RoPE scaling {self.kind}")

    def _sharpness(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024): each frequency is divided by its own factor.

    Sequences up to the original length use `short_factor`, longer ones `long_factor`.
    """

    kind = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None
    """The factor on cosines and sines. None: computed from `factor`."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        sharper = self.attention_factor
        _check(sharper is None or sharper > 0, "attention_factor", sharper, "above 0")
        for name in ("short_factor", "long_factor"):
            least = min(getattr(self, name), default=1.0)
            _check(least > 0, f"the least of {name}", least, "above 0")

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines: `attention_factor`, or LongRoPE's formula."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))

    def check_model(self, head_dim: int, theta: float) -> None:
        """Raise ConfigError unless both lists have `head_dim` / 2 factors."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != head_dim // 2:
                raise ConfigError(
                    f"{name} has {count} entries, but head_dim={head_dim} has {head_dim // 2} "
                    "frequencies; give one entry for each"
                )


KINDS: Mapping[str, type[RopeScaling]] = {
    kind.kind: kind
    for kind in (LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling, Llama3Scaling)
}


def read_rope(raw: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies and their scaling, from the contents of `config.json`.

    Raises CheckpointError for unknown kinds and keys, for missing or impossible values, and if
    `rope_parameters` and `rope_scaling` contradict each other. The error names `source`, the key,
    its value and the remedy.
    """
    sections = {name: _section(raw, name, source) for name in SPELLINGS if raw.get(name)}
    scalings = {name: _scaling(section, raw, name, source) for name, section in sections.items()}
    if len(set(scalings.values())) > 1:
        listed = " and ".join(f"{name}={dict(section)}" for name, section in sections.items())
        raise CheckpointError(
            f"{source}: {listed} contradict each other; remove the one that the model was not "
            "trained with"
        )
    scaling = next(iter(scalings.values()), None)
    return _theta(raw, sections, source), scaling


def _section(raw: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    section = raw[name]
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{source}: {name} must be an object, got {shown(section)}")
    nested = [key for key, value in section.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"{source}: {name} has separate frequencies for {nested[0]}, but Slipstream's decoder "
            "uses the same frequencies in all layers"
        )
    return section


def _theta(raw: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], source: str) -> float:
    places = {"rope_theta": raw} | {f"{name}.rope_theta": part for name, part in sections.items()}
    thetas = {
        place: _number(part["rope_theta"], f"{source}: {place}")
        for place, part in places.items()
        if part.get("rope_theta") is not None
    }
    if len(set(thetas.values())) > 1:
        listed = " and ".join(f"{place}={theta:g}" for place, theta in thetas.items())
        raise CheckpointError(
            f"{source}: {listed} contradict each other; remove the one that the model was not "
            "trained with"
        )
    theta = next(iter(thetas.values()), DEFAULT_THETA)
    if theta <= 0:
        raise CheckpointError(f"{source}: rope_theta={theta:g} must be above 0; 10000 is usual")
    return theta


def _scaling(
    section: Mapping[str, Any], raw: Mapping[str, Any], name: str, source: str
) -> RopeScaling | None:
    where = f"{source}: {name}"
    named = {key: section[key] for key in ("rope_type", "type") if section.get(key) is not None}
    kinds = set(map(str, named.values()))
    if len(kinds) > 1:
        listed = " and ".join(f"{key}={value!r}" for key, value in named.items())
        raise CheckpointError(
            f"{where}: {listed} contradict each other; keep the one that the model was trained with"
        )
    kind = kinds.pop() if kinds else "default"
    if kind != "default" and kind not in KINDS:
        raise CheckpointError(
            f"{where}: RoPE scaling {kind!r} is not known{did_you_mean(kind, KINDS)}; known: "
            f"default, {', '.join(KINDS)}"
        )
    cls = KINDS.get(kind)
    known = [] if cls is None else list(fields(cls))
    names = {field.name for field in known}
    for key, value in section.items():
        if value is not None and key not in names | _OF_EVERY_KIND:
            raise CheckpointError(
                f"{where}.{key}={shown(value)} is no setting of RoPE scaling {kind!r}"
                f"{did_you_mean(key, names)}; remove it if the model was trained without it"
            )
    if cls is None:
        return None
    values = {**section}
    if _ORIGINAL in names:
        values[_ORIGINAL] = _original(section, raw, where)
    if cls is LongRopeScaling and values.get("factor") is None:
        values["factor"] = _lengthened(raw, values[_ORIGINAL])
    try:
        return cls(**{f.name: _value(values, f, kind, where) for f in known if _given(values, f)})
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: {error}; set it to the value that the model was trained with"
        ) from None


def _lengthened(raw: Mapping[str, Any], original: object) -> float | None:
    """Return the factor from the extended and the original length, or None if one is missing."""
    longest = raw.get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(original, int) and original > 0:
        return max(1.0, longest / original)
    return None


def _original(section: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> object:
    """Return the original length. Phi-3's files have it at the top level, others in the section."""
    inner, outer = section.get(_ORIGINAL), raw.get(_ORIGINAL)
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(
            f"{where}.{_ORIGINAL}={inner!r} and {_ORIGINAL}={outer!r} contradict each other; "
            "remove the one that the model was not trained with"
        )
    return outer if inner is None else inner


def _given(values: Mapping[str, Any], field: Field[Any]) -> bool:
    return values.get(field.name) is not None or field.default is MISSING


def _value(values: Mapping[str, Any], field: Field[Any], kind: str, where: str) -> object:
    value = values.get(field.name)
    place = f"{where}.{field.name}"
    if value is None:
        raise CheckpointError(
            f"{place} is missing, which RoPE scaling {kind!r} needs; set it to the value that the "
            "model was trained with"
        )
    kind_of_value = str(field.type).removesuffix(" | None")
    if kind_of_value == "tuple[float, ...]":
        if not isinstance(value, list):
            raise CheckpointError(f"{place}={shown(value)} must be a list of numbers")
        return tuple(_number(entry, f"an entry of {place}") for entry in value)
    if kind_of_value == "bool":
        if not isinstance(value, bool):
            raise CheckpointError(f"{place}={shown(value)} must be true or false")
        return value
    number = _number(value, place)
    if kind_of_value == "int" and number != int(number):
        raise CheckpointError(f"{place}={shown(value)} must be a whole number")
    return int(number) if kind_of_value == "int" else number


def _number(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise CheckpointError(f"{place}={shown(value)} must be a finite number")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _check(holds: bool, name: str, value: object, requirement: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} must be {requirement}")


def _check_factor(factor: float) -> None:
    _check(factor >= 1, "factor", factor, "at least 1")
    _check(factor <= _MOST_FACTOR, "factor", factor, f"at most {_MOST_FACTOR}")


def _check_original(length: int) -> None:
    _check(length > 1, _ORIGINAL, length, "above 1")
