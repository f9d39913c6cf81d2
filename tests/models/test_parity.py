"""Parity of the decoder with transformers: logits, greedy tokens, files in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models import Decoder, load_checkpoint, save_checkpoint
from slipstream.models.hf_io import INDEX, WEIGHTS, load_config
from tests.models.helpers import (
    FAMILIES,
    VOCAB,
    config,
    load_theirs,
    logits,
    make_decoder,
    random_ids,
    their_logits,
)


def assert_same_weights(a: Decoder, b: Decoder) -> None:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_our_folder(family: str, tied: bool, tmp_path: Path) -> None:
    decoder = make_decoder(family, tie_word_embeddings=tied)
    save_checkpoint(decoder, tmp_path)
    model = load_theirs(tmp_path)
    ids = random_ids(3, 150)
    ours, theirs = logits(decoder, ids), their_logits(model, ids)
    assert 0.3 < float(ours.std()) < 5
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert_same_weights(load_checkpoint(tmp_path), decoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_generate(family: str, tmp_path: Path) -> None:
    decoder = make_decoder(family, eos_token_id=None)
    save_checkpoint(decoder, tmp_path)
    prompt = random_ids(1, 7, seed=3)
    theirs = load_theirs(tmp_path).generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=40,
        pad_token_id=0,
    )
    ids = prompt
    for _ in range(40):
        ids = torch.cat([ids, logits(decoder, ids)[:, -1:].argmax(-1)], 1)
    assert theirs.tolist() == ids.tolist()
    assert len(set(ids[0, 7:].tolist())) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_our_shards(family: str, tmp_path: Path) -> None:
    decoder = make_decoder(family)
    save_checkpoint(decoder, tmp_path, max_shard_bytes=40_000)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert not (tmp_path / WEIGHTS).exists()
    ids = random_ids(2, 20)
    single = tmp_path / "single"
    save_checkpoint(decoder, single)
    assert torch.equal(
        their_logits(load_theirs(tmp_path), ids), their_logits(load_theirs(single), ids)
    )
    assert_same_weights(load_checkpoint(tmp_path), decoder)


def their_model(family: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = config(family, **more).to_hf()
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_we_load_a_folder_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    model = their_model(family, tie_word_embeddings=tied)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ids = random_ids(2, 60)
    expected = their_logits(model.eval(), ids)
    for shard in ("1GB", "30KB"):
        folder = tmp_path / shard
        model.save_pretrained(folder, max_shard_size=shard)
        assert (folder / INDEX).exists() == (shard == "30KB")
        decoder = load_checkpoint(folder)
        assert decoder.config == config(family, tie_word_embeddings=tied)
        torch.testing.assert_close(logits(decoder, ids), expected, atol=1e-5, rtol=1e-5)


def test_a_bf16_folder_survives_a_round_trip(tmp_path: Path) -> None:
    model = their_model("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_checkpoint(tmp_path / "theirs")
    for name, parameter in model.named_parameters():
        ours = dict(decoder.named_parameters())[name]
        assert ours.dtype == torch.float32
        assert torch.equal(ours, parameter.float())
    save_checkpoint(decoder, tmp_path / "ours", dtype=torch.bfloat16)
    assert_same_weights(load_checkpoint(tmp_path / "ours"), decoder)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_theta_is_read_from_both_keys(family: str, tmp_path: Path) -> None:
    save_checkpoint(make_decoder(family, rope_theta=777.0), tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 777.0
    for spelling in ("rope_theta", "rope_parameters"):
        path.write_text(json.dumps({k: v for k, v in raw.items() if k != spelling}))
        assert load_config(tmp_path).rope_theta == 777.0
        ids = random_ids(1, 100)
        assert torch.allclose(
            logits(load_checkpoint(tmp_path), ids),
            their_logits(load_theirs(tmp_path), ids),
            atol=2e-5,
            rtol=0,
        )
    path.write_text(
        json.dumps({k: v for k, v in raw.items() if k not in ("rope_theta", "rope_parameters")})
    )
    assert load_config(tmp_path).rope_theta == 10000.0


def test_rotations_of_far_positions_equal_transformers_bit_for_bit(tmp_path: Path) -> None:
    from slipstream.models.functional import rope_table

    c = config("llama", max_position_embeddings=4096)
    save_checkpoint(Decoder(c), tmp_path)
    positions = torch.arange(4096)[None]
    cos, sin = load_theirs(tmp_path).model.rotary_emb(torch.ones(1), positions)
    our_cos, our_sin = rope_table(c, torch.float32, positions.device)
    assert torch.equal(our_cos, cos[0])
    # Our sine includes the sign of the rotation.
    half = c.head_dim // 2
    assert torch.equal(our_sin[:, half:], sin[0, :, half:])
    assert torch.equal(our_sin[:, :half], -sin[0, :, :half])


def test_end_of_sequence_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    save_checkpoint(make_decoder(), tmp_path, generation={"eos_token_id": [5, 7]})
    assert load_config(tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    assert load_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("eos", [None, 4, (4, 9)])
def test_end_of_sequence_ids_survive_a_round_trip(
    eos: int | tuple[int, ...] | None, tmp_path: Path
) -> None:
    save_checkpoint(make_decoder(eos_token_id=eos), tmp_path)
    assert load_config(tmp_path).eos_token_id == eos
    raw = json.loads((tmp_path / "generation_config.json").read_text())
    assert raw["eos_token_id"] == (list(eos) if isinstance(eos, tuple) else eos)


def test_saving_again_removes_the_old_weights_and_keeps_other_files(tmp_path: Path) -> None:
    first, second = make_decoder(seed=1), make_decoder(seed=2)
    keep = tmp_path / "model-card.md"
    for shard_bytes in (40_000, 5_000_000, 90_000):
        for decoder in (first, second):
            keep.parent.mkdir(exist_ok=True)
            keep.write_text("mine")
            save_checkpoint(decoder, tmp_path, max_shard_bytes=shard_bytes)
            assert_same_weights(load_checkpoint(tmp_path), decoder)
    assert keep.read_text() == "mine"


def test_the_tokenizer_is_saved_too(tmp_path: Path) -> None:
    seen: list[str] = []
    save_checkpoint(make_decoder(), tmp_path, save_tokenizer=seen.append)
    assert seen == [str(tmp_path)]


def test_every_token_of_the_vocabulary_has_an_embedding() -> None:
    decoder = make_decoder()
    out = logits(decoder, torch.arange(VOCAB)[None])
    assert out.isfinite().all()
    assert out.shape == (1, VOCAB, VOCAB)
