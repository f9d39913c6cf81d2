"""RoPE scaling: how a checkpoint's rotary frequencies differ from the plain ones, as data.

Reads `rope_parameters` (transformers 5) and `rope_scaling` (before) of a `config.json` and writes
what both hold. Knows no tensors: what is computed from it is in `rope_frequencies`. Called by
`config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any, ClassVar

from slipstream.errors import CheckpointError, ConfigError, did_you_mean

DEFAULT_THETA = 10000.0
SPELLINGS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
_OF_EVERY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """What every kind has."""

    kind: ClassVar[str]

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by: scores are by its square."""
        return 1.0

    def check_model(self, head_dim: int, theta: float) -> None:
        """Raises ConfigError where heads of that width, or that base, cannot be scaled so."""

    def to_hf(self) -> dict[str, Any]:
        """As in `rope_parameters`, without the base."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
        return {"rope_type": self.kind, **given, **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Positions are divided by `factor` (Chen et al. 2023)."""

    kind = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check(self.factor >= 1, "factor", self.factor, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling(RopeScaling):
    """NTK-aware scaling that grows with the sequence beyond `max_position_embeddings`; up to there
    frequencies are the plain ones."""

    kind = "dynamic"
    factor: float

    def __post_init__(self) -> None:
        _check(self.factor >= 1, "factor", self.factor, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Slow frequencies are divided by `factor`, fast ones kept, those between mixed (Llama 3.1)."""

    kind = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        _check(self.factor >= 1, "factor", self.factor, "at least 1")
        _check(low > 0, "low_freq_factor", low, "above 0")
        _check(high > low, "high_freq_factor", high, f"above low_freq_factor={low:g}")
        _check_original(self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling(RopeScaling):
    """Frequencies of fewer than `beta_slow` turns in the original context are divided by `factor`,
    those of more than `beta_fast` kept, those between mixed, and scores are sharpened (YaRN, Peng
    et al. 2023)."""

    kind = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    """Of cosines and sines; None: after `factor`, and `mscale` where both are given."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the range of those between ends at whole numbers."""

    def __post_init__(self) -> None:
        _check(self.factor >= 1, "factor", self.factor, "at least 1")
        _check_original(self.original_max_position_embeddings)
        fast, slow, sharper = self.beta_fast, self.beta_slow, self.attention_factor
        _check(slow > 0, "beta_slow", slow, "above 0")
        _check(fast > slow, "beta_fast", fast, f"above beta_slow={slow:g}")
        _check(sharper is None or sharper > 0, "attention_factor", sharper, "above 0")

    @property
    def magnitude(self) -> float:
        """See `RopeScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def reach(self) -> int:
        """Tokens of the context that the frequencies are stretched to."""
        return int(self.factor * self.original_max_position_embeddings)

    def check_model(self, head_dim: int, theta: float) -> None:
        """See `RopeScaling`."""
        if theta <= 1:
            raise ConfigError(f"rope_theta={theta:g} must be above 1 for RoPE scaling {self.kind}")

    def _sharpness(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    """Each frequency is divided by a number of its own: of `short_factor` in sequences of up to the
    original length, of `long_factor` in longer ones (LongRoPE, Ding et al. 2024)."""

    kind = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None
    """Of cosines and sines; None: after `factor`."""

    def __post_init__(self) -> None:
        _check(self.factor >= 1, "factor", self.factor, "at least 1")
        _check_original(self.original_max_position_embeddings)
        sharper = self.attention_factor
        _check(sharper is None or sharper > 0, "attention_factor", sharper, "above 0")
        for name in ("short_factor", "long_factor"):
            least = min(getattr(self, name), default=1.0)
            _check(least > 0, f"the least of {name}", least, "above 0")

    @property
    def magnitude(self) -> float:
        """See `RopeScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))

    def check_model(self, head_dim: int, theta: float) -> None:
        """See `RopeScaling`."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != head_dim // 2:
                raise ConfigError(
                    f"{name} has {count} entries, and heads of head_dim={head_dim} have "
                    f"{head_dim // 2} frequencies; give one for each"
                )


KINDS: Mapping[str, type[RopeScaling]] = {
    kind.kind: kind
    for kind in (LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling, Llama3Scaling)
}


def read_rope(raw: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """The base of the frequencies and their scaling, from the contents of `config.json`.

    Raises CheckpointError, which names `source`, the key, its value and the remedy, for kinds and
    keys that are not known, missing or impossible values, and spellings that contradict each other.
    """
    sections = {name: _section(raw, name, source) for name in SPELLINGS if raw.get(name)}
    scalings = {name: _scaling(section, raw, name, source) for name, section in sections.items()}
    if len(set(scalings.values())) > 1:
        told = " and ".join(f"{name}={dict(section)}" for name, section in sections.items())
        raise CheckpointError(
            f"{source}: {told} contradict each other; remove the one that the model was not "
            "trained with"
        )
    scaling = next(iter(scalings.values()), None)
    return _theta(raw, sections, source), scaling


def _section(raw: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    section = raw[name]
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{source}: {name} must be an object, got {section!r}")
    nested = [key for key, value in section.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"{source}: {name} has frequencies of its own for {nested[0]}; Slipstream's decoder "
            "turns all layers alike"
        )
    return section


def _theta(raw: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], source: str) -> float:
    places = {"rope_theta": raw} | {f"{name}.rope_theta": part for name, part in sections.items()}
    given = {
        place: _number(part["rope_theta"], f"{source}: {place}")
        for place, part in places.items()
        if part.get("rope_theta") is not None
    }
    if len(set(given.values())) > 1:
        told = " and ".join(f"{place}={theta:g}" for place, theta in given.items())
        raise CheckpointError(
            f"{source}: {told} contradict each other; remove the one that the model was not "
            "trained with"
        )
    theta = next(iter(given.values()), DEFAULT_THETA)
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
        told = " and ".join(f"{key}={value!r}" for key, value in named.items())
        raise CheckpointError(f"{where}: {told} contradict each other; keep the one that is meant")
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
                f"{where}.{key}={value!r} is no setting of RoPE scaling {kind!r}"
                f"{did_you_mean(key, names)}; remove it if the model was trained without"
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
            f"{where}: {error}; put the value there that it was trained with"
        ) from None


def _lengthened(raw: Mapping[str, Any], original: object) -> float | None:
    """By how much, where a file gives both lengths instead."""
    longest = raw.get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(original, int) and original > 0:
        return max(1.0, longest / original)
    return None


def _original(section: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> object:
    """Phi-3's files have it at the top, all others in the section."""
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
            f"{place} is missing, which RoPE scaling {kind!r} needs; put the value there that the "
            "model was trained with"
        )
    kind_of_value = str(field.type).removesuffix(" | None")
    if kind_of_value == "tuple[float, ...]":
        if not isinstance(value, list):
            raise CheckpointError(f"{place}={value!r} must be a list of numbers")
        return tuple(_number(entry, f"an entry of {place}") for entry in value)
    if kind_of_value == "bool":
        if not isinstance(value, bool):
            raise CheckpointError(f"{place}={value!r} must be true or false")
        return value
    number = _number(value, place)
    if kind_of_value == "int" and number != int(number):
        raise CheckpointError(f"{place}={value!r} must be a whole number")
    return int(number) if kind_of_value == "int" else number


def _number(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{place}={value!r} must be a finite number")
    return float(value)


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} must be {wanted}")


def _check_original(length: int) -> None:
    _check(length > 1, _ORIGINAL, length, "above 1")
