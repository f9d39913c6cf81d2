"""Sliding windows: which layers of a checkpoint see the last so many tokens only.

Reads and writes what a `config.json` says of them, family by family as transformers does. Layers
with a window are computed as long as it leaves nothing out (`config.ModelConfig.context_limit`).
Called by `config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import CheckpointError

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_DEFAULT_WINDOW = 4096
"""Of transformers, where a file that has windows says nothing."""
_DEFAULT_FULL_LAYERS = 28
_OFF = "set it to null if the model was trained without windows"


def read_windows(
    raw: Mapping[str, Any], family: str, num_layers: int, source: str
) -> tuple[int | None, tuple[int, ...]]:
    """How many tokens a layer with a window sees, its own among them, and which layers have one;
    None and () where no layer has.

    Raises CheckpointError, naming `source`, for what the family does not have or cannot be.
    """
    types = _layer_types(raw, num_layers, source)
    if family == "llama":
        _refuse_windows(raw, types, source)
        return None, ()
    if family == "mistral":
        size = _size(raw, source)
        layers = () if size is None else tuple(range(num_layers))
        if types is not None and layers != _windowed(types):
            raise CheckpointError(
                f"{source}: layer_types={list(types)} and sliding_window={size} contradict each "
                "other, for a Mistral model has a window in all layers or in none; remove "
                "layer_types"
            )
        return size, layers
    size = _size(raw, source) if raw.get("use_sliding_window") else None
    if types is not None:
        layers = _windowed(types)
        if layers and size is None:
            raise CheckpointError(
                f"{source}: layer_types has {_WINDOWED}, and use_sliding_window="
                f"{raw.get('use_sliding_window')!r} with sliding_window="
                f"{raw.get('sliding_window')!r} gives no window; set both, or remove layer_types"
            )
    else:
        first = _count(raw, "max_window_layers", _DEFAULT_FULL_LAYERS, source)
        layers = tuple(range(first, num_layers))
    return (size, layers) if size is not None and layers else (None, ())


def windows_to_hf(
    family: str, num_layers: int, window: int | None, layers: Sequence[int]
) -> dict[str, Any]:
    """What `read_windows` reads."""
    if family == "mistral":
        return {"sliding_window": window}
    if window is None:
        return {}
    types = [_WINDOWED if layer in layers else _FULL for layer in range(num_layers)]
    out = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    if list(layers) == list(range(layers[0], num_layers)):
        # Read by programs that do not know `layer_types`.
        out["max_window_layers"] = layers[0]
    return out


def _layer_types(raw: Mapping[str, Any], num_layers: int, source: str) -> tuple[str, ...] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in (_FULL, _WINDOWED) for kind in types)
    if not known or len(types) != num_layers:
        raise CheckpointError(
            f"{source}: layer_types={types!r} must name {_FULL} or {_WINDOWED} for each of "
            f"{num_layers} layers"
        )
    return tuple(types)


def _windowed(types: Sequence[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(types) if kind == _WINDOWED)


def _refuse_windows(raw: Mapping[str, Any], types: Sequence[str] | None, source: str) -> None:
    size, on = raw.get("sliding_window"), raw.get("use_sliding_window")
    # Where other families' switch says that they are off, the size says nothing.
    if (size is not None and on is not False) or on or _WINDOWED in (types or ()):
        told = {"sliding_window": size, "use_sliding_window": on, "layer_types": types}
        shown = ", ".join(f"{name}={value!r}" for name, value in told.items() if value)
        raise CheckpointError(
            f"{source}: {shown}, but Llama models have no sliding-window attention; remove it if "
            "the model was trained without, or name the family that it is of in model_type"
        )


def _size(raw: Mapping[str, Any], source: str) -> int | None:
    if raw.get("sliding_window", _DEFAULT_WINDOW) is None:
        return None
    size = _count(raw, "sliding_window", _DEFAULT_WINDOW, source)
    if size < 1:
        raise CheckpointError(f"{source}: sliding_window={size} must be at least 1; {_OFF}")
    return size


def _count(raw: Mapping[str, Any], name: str, default: int, source: str) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{source}: {name}={value!r} must be a whole number; {_OFF}")
    return value
