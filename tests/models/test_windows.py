"""Sliding windows: reading as in transformers, and sequences no longer than the window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import ModelConfig, load_checkpoint, save_checkpoint
from slipstream.models.hf_io import load_config
from tests.models.helpers import (
    config,
    load_theirs,
    logits,
    make_decoder,
    random_ids,
    their_logits,
)

WINDOW = 24


@pytest.mark.parametrize(
    ("family", "layers"), [("mistral", (0, 1, 2)), ("qwen2", (1, 2)), ("qwen3", (0, 2))]
)
def test_logits_match_transformers_up_to_the_window_size(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    decoder = make_decoder(family, sliding_window=WINDOW, windowed_layers=layers)
    save_checkpoint(decoder, tmp_path)
    assert load_checkpoint(tmp_path).config == decoder.config
    model = load_theirs(tmp_path)
    ids = random_ids(2, WINDOW)
    assert torch.allclose(logits(decoder, ids), their_logits(model, ids), atol=2e-5)
    # In transformers the window matters: with one token more, the first token is hidden.
    longer, changed = random_ids(1, WINDOW + 1), random_ids(1, WINDOW + 1)
    changed[0, 0] = (changed[0, 0] + 1) % 96
    unlimited = make_decoder(family)
    ours, theirs = logits(unlimited, longer), their_logits(model, longer)
    assert torch.allclose(ours[:, :WINDOW], theirs[:, :WINDOW], atol=2e-5)
    assert not torch.allclose(ours[:, WINDOW], theirs[:, WINDOW], atol=1e-3)
    with pytest.raises(IndexError, match="sliding_window=24, beyond which"):
        logits(decoder, longer)


def test_config_json_determines_the_windowed_layers() -> None:
    def read(family: str, **more: Any) -> tuple[int | None, tuple[int, ...]]:
        raw = {**config(family).to_hf(), **more}
        c = ModelConfig.from_hf(raw, source="x")
        return c.sliding_window, c.windowed_layers

    on = {"use_sliding_window": True, "sliding_window": 8}
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read("qwen2", **on, max_window_layers=2) == (8, (2,))
    assert read("qwen2", **on, max_window_layers=3) == (None, ())
    assert read("qwen2", **on) == (None, ())  # 28 layers without one
    assert read("qwen3", **on, layer_types=types, max_window_layers=0) == (8, (1,))
    assert read("qwen3", use_sliding_window=True, max_window_layers=0) == (4096, (0, 1, 2))
    assert read("qwen3", use_sliding_window=True, sliding_window=None) == (None, ())
    # As Qwen2.5 is published.
    assert read("qwen2", use_sliding_window=False, sliding_window=8) == (None, ())
    assert read("mistral", sliding_window=8) == (8, (0, 1, 2))
    assert read("mistral", sliding_window=None) == (None, ())
    assert read("llama", use_sliding_window=False, sliding_window=8) == (None, ())
    raw = config("mistral").to_hf()
    assert raw["sliding_window"] is None
    del raw["sliding_window"]  # transformers assumes 4096 if the key is missing
    assert ModelConfig.from_hf(raw, source="x").sliding_window == 4096


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be at least 1; set it to null"),
        ("mistral", {"sliding_window": "8"}, "sliding_window='8' must be a whole number"),
        ("mistral", {"sliding_window": 8.5}, "sliding_window=8.5 must be a whole number"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "and sliding_window=None contradict each other",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
            "max_window_layers=-1 must be a whole number",
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, "for each of 3 layers"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attent"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window=None and sliding_window=None define no window; set both",
        ),
        ("llama", {"sliding_window": 8}, "sliding_window=8, but Llama models have no sliding-win"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True, but Llama models have"),
    ],
)
def test_invalid_window_settings_raise_an_error(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_checkpoint(make_decoder(family), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_window_needs_existing_layers() -> None:
    for windows in (
        {"sliding_window": 8},
        {"windowed_layers": (0,)},
        {"sliding_window": 0, "windowed_layers": (0,)},
        {"sliding_window": 8, "windowed_layers": (3,)},
    ):
        with pytest.raises(ConfigError):
            config("mistral", **windows)


def test_files_saved_by_transformers_are_read(tmp_path: Path) -> None:
    for family, layers in (("mistral", (0, 1, 2)), ("qwen2", (1, 2)), ("qwen3", (0, 2))):
        decoder = make_decoder(family, sliding_window=WINDOW, windowed_layers=layers)
        save_checkpoint(decoder, tmp_path / family)
        load_theirs(tmp_path / family).save_pretrained(tmp_path / "theirs")
        assert load_config(tmp_path / "theirs") == decoder.config
