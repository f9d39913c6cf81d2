"""The architecture of a decoder, and its translation to and from a Hugging Face `config.json`.

This module knows file formats and sizes, not tensors. Families: Qwen2 and Qwen2.5 (`qwen2`), Qwen3
(`qwen3`), Llama 2 and 3 (`llama`), Mistral (`mistral`). `rope_scaling` and `windows` translate the
keys of RoPE scaling and of sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from slipstream.config.engines import engines_with, generates_with
from slipstream.errors import CheckpointError, ConfigError, check_at_least_one
from slipstream.models.rope_scaling import (
    DEFAULT_THETA,
    SPELLINGS,
    DynamicScaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    read_rope,
)
from slipstream.models.windows import read_windows, windows_to_hf
from slipstream.reading import shown
from slipstream.types import PolicyKind

Family = Literal["qwen2", "qwen3", "llama", "mistral"]

_ARCHITECTURES: dict[str, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
_MOST_LAYERS = 10_000
_MOST_SIZE = 2**31 - 1
"""Sizes beyond these belong to no model, and computing with them would not end."""
_MOST_POSITIONS = 2**24
"""The rotary embeddings of all positions are in memory. No published model has more than 10.5
million."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The maximum length of a sequence in tokens, with the reason for messages."""

    tokens: int
    reason: str
    of_decoder: bool = False
    """Whether only Slipstream's decoder has this limit, and transformers' own class does not."""
    of_config: bool = False
    """Whether the limit is `max_position_embeddings`, which a user may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of one decoder.

    `head_dim * num_heads` may differ from `hidden_size` (Qwen3). Raises ConfigError if a value is
    impossible or values contradict each other.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 4096
    rope_theta: float = DEFAULT_THETA
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Number of tokens that a layer in `windowed_layers` sees, including the query's own token."""
    windowed_layers: tuple[int, ...] = ()
    """Indices of the layers with a sliding window."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise ConfigError(
                f"unknown model family {self.family!r}; known: {', '.join(get_args(Family))}"
            )
        check_at_least_one(self, *_SIZES)
        for name in _SIZES:
            most = {"num_layers": _MOST_LAYERS, "max_position_embeddings": _MOST_POSITIONS}.get(
                name, _MOST_SIZE
            )
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)} must be at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}: all key-value heads serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.rope_scaling is not None:
            self.rope_scaling.check_model(self.head_dim, self.rope_theta)
        self._check_windows()

    def _check_windows(self) -> None:
        check_at_least_one(self, "sliding_window")
        layers = self.windowed_layers
        if (self.sliding_window is None) != (not layers):
            raise ConfigError(
                f"sliding_window={self.sliding_window} and windowed_layers={layers} contradict "
                "each other; set a window and its layers, or None and ()"
            )
        if any(layer not in range(self.num_layers) for layer in layers):
            raise ConfigError(
                f"windowed_layers={layers} must be layer indices from 0 to {self.num_layers - 1}"
            )

    @property
    def context_limit(self) -> ContextLimit:
        """The longest sequence for which the decoder computes what the model was trained on.

        Two facts limit it beyond `max_position_embeddings`. The decoder does not implement sliding
        windows. And some RoPE scalings change all frequencies once the sequence exceeds a length:
        beyond it, the keys in an engine's KV cache differ from those that the trainer computes.
        """
        positions, scaling = self.max_position_embeddings, self.rope_scaling
        reason = f"the model has max_position_embeddings={positions}"
        if isinstance(scaling, DynamicScaling):
            reason += f", beyond which RoPE scaling {scaling.kind!r} rotates earlier keys anew"
        if isinstance(scaling, YarnScaling) and (reach := scaling.reach) > positions:
            # Qwen's model cards tell users to add YaRN, but not to raise max_position_embeddings.
            reason += (
                f", but its RoPE scaling {scaling.kind!r} extends to {reach} (to use that, set "
                f"override_config.max_position_embeddings={reach})"
            )
        limits = [ContextLimit(positions, reason, of_config=True)]
        if isinstance(scaling, LongRopeScaling):
            original = scaling.original_max_position_embeddings
            limits.append(
                ContextLimit(
                    original,
                    f"the model has original_max_position_embeddings={original}, beyond which RoPE "
                    f"scaling {scaling.kind!r} rotates earlier keys anew",
                )
            )
        if self.sliding_window is not None:
            limits.append(
                ContextLimit(
                    self.sliding_window,
                    f"the model has sliding_window={self.sliding_window}, beyond which "
                    f"{len(self.windowed_layers)} of its {self.num_layers} layers would ignore "
                    "earlier tokens, which Slipstream's decoder does not do",
                    of_decoder=True,
                )
            )
        return min(limits, key=lambda limit: limit.tokens)

    @property
    def rope_magnitude(self) -> float:
        """The factor on the cosines and sines of the rotary embeddings."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude

    @property
    def attention_bias(self) -> bool:
        """Qwen2 adds a bias to q, k and v."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises queries and keys per head."""
        return self.family == "qwen3"

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def parameters(self) -> int:
        """The number of parameters in the matrices, which are almost all of the model's."""
        ends = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return ends + self.num_layers * self.layer_weights

    @property
    def layer_weights(self) -> int:
        """The number of weights in the matrices of a layer."""
        heads = 2 * (self.num_heads + self.num_kv_heads)
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence tokens; () if the model has none."""
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, int):
            return (self.eos_token_id,)
        return self.eos_token_id

    def with_end_tokens(self, ids: Sequence[int]) -> ModelConfig:
        """Return this configuration with `ids` as additional end-of-sequence tokens."""
        own = self.eos_token_ids
        ends = own + tuple(i for i in ids if i not in own)
        if ends == own:
            return self
        return replace(self, eos_token_id=ends if len(ends) > 1 else ends[0])

    def to_hf(self, *, dtype: str = "float32") -> dict[str, Any]:
        """Return the contents of `config.json`, with RoPE under both key names in use."""
        scaling = None if self.rope_scaling is None else self.rope_scaling.to_hf()
        kind = {"rope_type": "default"} if scaling is None else scaling
        eos = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": {**kind, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "attention_dropout": 0.0,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
        }
        if scaling is not None:
            # Programs that know only this key would otherwise compute without the scaling.
            out["rope_scaling"] = scaling
        if self.family in ("qwen3", "llama"):
            out["attention_bias"] = False
        if self.family == "llama":
            out["mlp_bias"] = False
        return out | windows_to_hf(
            self.family, self.num_layers, self.sliding_window, self.windowed_layers
        )

    def one_layer(self) -> ModelConfig:
        """Return this configuration with one layer, windowed if any layer of this one is."""
        layers = () if self.sliding_window is None else (0,)
        return replace(self, num_layers=1, windowed_layers=layers)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, source: str) -> ModelConfig:
        """Return the configuration in the contents of a `config.json`.

        `source` names the file in errors. Raises CheckpointError for an unsupported architecture,
        unknown or contradictory settings of RoPE or windows, biases that the family does not have,
        or a missing key.
        """
        family = _family(raw.get("model_type"))
        if family is None:
            raise CheckpointError(
                f"{source}: model_type {shown(raw.get('model_type'))} is not one that Slipstream's "
                f"decoder supports ({', '.join(get_args(Family))}); to train a policy of another "
                "family through transformers, set actor_rollout_ref.model.implementation=auto and "
                f"{engines_with(generates_with(PolicyKind.TRANSFORMERS))}"
            )
        _refuse_unsupported(raw, family, source)
        theta, scaling = read_rope(raw, source)
        read = _Reader(raw, source)
        num_layers = read.size("num_hidden_layers", _MOST_LAYERS)
        window, windowed_layers = read_windows(raw, family, num_layers, source)
        hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
        try:
            return cls(
                family=family,
                vocab_size=read.size("vocab_size"),
                hidden_size=hidden,
                intermediate_size=read.size("intermediate_size"),
                num_layers=num_layers,
                num_heads=heads,
                num_kv_heads=read.size("num_key_value_heads", default=heads),
                head_dim=read.size("head_dim", default=hidden // heads),
                max_position_embeddings=read.size("max_position_embeddings", _MOST_POSITIONS),
                rope_theta=theta,
                rope_scaling=scaling,
                sliding_window=window,
                windowed_layers=windowed_layers,
                rms_norm_eps=read.fraction("rms_norm_eps"),
                tie_word_embeddings=read.flag("tie_word_embeddings"),
                initializer_range=read.fraction("initializer_range", 0.02),
                bos_token_id=read.token("bos_token_id"),
                eos_token_id=read.tokens("eos_token_id"),
                pad_token_id=read.token("pad_token_id"),
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{source}: {error}") from None


_AS_TRAINED = "set it to the value that the model was trained with"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the fields of a `config.json`. Each error names the file, the field and the value."""

    raw: Mapping[str, Any]
    source: str

    def size(self, key: str, most: int = _MOST_SIZE, *, default: int | None = None) -> int:
        """Return a whole number from 1 to `most`; `default` if the field is null or missing."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self._refusal(key, value, f"a whole number from 1 to {most}")
        return value

    def fraction(self, key: str, default: float | None = None) -> float:
        """Return a number from 0 to 1."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._refusal(key, value, "a number from 0 to 1")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a truth value, false if the field is null or missing."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise self._refusal(key, value, "true or false")
        return value

    def token(self, key: str) -> int | None:
        """Return the id of a token, or None. Some models use -1 for no token."""
        value = self.raw.get(key)
        if value is not None and not _is_token(value):
            raise self._refusal(key, value, "a token id or null")
        return value

    def tokens(self, key: str) -> int | tuple[int, ...] | None:
        """Return one token id, several, or None."""
        value = self.raw.get(key)
        if not isinstance(value, list | tuple):
            return self.token(key)
        if not all(map(_is_token, value)):
            raise self._refusal(key, value, "a token id, a list of token ids, or null")
        return tuple(value)

    def _value(self, key: str, default: object) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None and key not in self.raw:
            raise CheckpointError(f"{self.source}: key {key!r} is missing; {_AS_TRAINED}")
        return default

    def _refusal(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key}={shown(value)} must be {expected}; {_AS_TRAINED}"
        )


def read_tokens(raw: Mapping[str, Any], key: str, source: str) -> int | tuple[int, ...] | None:
    """Return the token ids in the field `key`. Raises CheckpointError, naming `source`."""
    return _Reader(raw, source).tokens(key)


def _is_token(value: object) -> bool:
    return type(value) is int and -1 <= value < _MOST_SIZE


def _family(model_type: object) -> Family | None:
    for family in get_args(Family):
        if family == model_type:
            return cast(Family, family)
    return None


def _refuse_unsupported(raw: Mapping[str, Any], family: str, source: str) -> None:
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{source}: quantized checkpoints are not supported; save the model in bf16 or fp32"
        )
    sections = (raw, *(raw.get(name) for name in SPELLINGS))
    for section in (section for section in sections if isinstance(section, Mapping)):
        partial = section.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise CheckpointError(
                f"{source}: partial_rotary_factor {shown(partial)} is not supported"
            )
    if family != "qwen2" and raw.get("attention_bias"):
        raise CheckpointError(f"{source}: attention_bias=true is not supported for {family}")
    if family == "llama" and raw.get("mlp_bias"):
        raise CheckpointError(f"{source}: mlp_bias=true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source}: hidden_act {shown(raw['hidden_act'])} is not supported")
