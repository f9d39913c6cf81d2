"""Read and write the sliding-window attention settings of a `config.json`.

The rules differ by model family and follow transformers. The decoder does not implement windows: it
computes windowed layers only for sequences no longer than the window, which then hides nothing
(`config.ModelConfig.context_limit`). `config` calls this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.reading import shown

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_DEFAULT_WINDOW = 4096
"""Window size in tokens that transformers assumes if `sliding_window` is missing."""
_DEFAULT_FULL_LAYERS = 28
"""Number of leading layers without a window that transformers assumes for `max_window_layers`."""
_OFF = "set it to null if the model was trained without windows"


def read_windows(
    raw: Mapping[str, Any], family: str, num_layers: int, source: str
) -> tuple[int | None, tuple[int, ...]]:
    """Return the window size in tokens and the indices of the layers with a window.

    The size counts the query's own token. The result is (None, ()) if no layer has a window. Raises
    CheckpointError, which names `source`, if the family does not support the settings or they
    contradict each other.
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
                "other: a Mistral model has a window in all layers or in none; remove layer_types"
            )
        return size, layers
    size = _size(raw, source) if raw.get("use_sliding_window") else None
    if types is not None:
        layers = _windowed(types)
        if layers and size is None:
            raise CheckpointError(
                f"{source}: layer_types names {_WINDOWED}, but use_sliding_window="
                f"{raw.get('use_sliding_window')!r} and sliding_window="
                f"{raw.get('sliding_window')!r} define no window; set both, or remove layer_types"
            )
    else:
        first = _count(raw, "max_window_layers", _DEFAULT_FULL_LAYERS, source)
        layers = tuple(range(first, num_layers))
    return (size, layers) if size is not None and layers else (None, ())


def windows_to_hf(
    family: str, num_layers: int, window: int | None, layers: Sequence[int]
) -> dict[str, Any]:
    """Return the `config.json` keys from which `read_windows` restores these settings."""
    if family == "mistral":
        return {"sliding_window": window}
    if window is None:
        return {}
    types = [_WINDOWED if layer in layers else _FULL for layer in range(num_layers)]
    out = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    if list(layers) == list(range(layers[0], num_layers)):
        # For programs that do not know `layer_types`.
        out["max_window_layers"] = layers[0]
    return out


def _layer_types(raw: Mapping[str, Any], num_layers: int, source: str) -> tuple[str, ...] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in (_FULL, _WINDOWED) for kind in types)
    if not known or len(types) != num_layers:
        raise CheckpointError(
            f"{source}: layer_types={shown(types)} must be a list with {_FULL} or {_WINDOWED} for "
            f"each of {num_layers} layers"
        )
    return tuple(types)


def _windowed(types: Sequence[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(types) if kind == _WINDOWED)


def _refuse_windows(raw: Mapping[str, Any], types: Sequence[str] | None, source: str) -> None:
    size, on = raw.get("sliding_window"), raw.get("use_sliding_window")
    # A size has no effect if use_sliding_window, which other families have, is false.
    if (size is not None and on is not False) or on or _WINDOWED in (types or ()):
        settings = {"sliding_window": size, "use_sliding_window": on, "layer_types": types}
        listed = ", ".join(f"{name}={shown(value)}" for name, value in settings.items() if value)
        raise CheckpointError(
            f"{source}: {listed}, but Llama models have no sliding-window attention; remove it if "
            "the model was trained without a window, or set model_type to the model's family"
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
        raise CheckpointError(f"{source}: {name}={shown(value)} must be a whole number; {_OFF}")
    return value
