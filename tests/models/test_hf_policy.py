"""Policies that run through transformers: logits, gradients, files, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError
from slipstream.models.hf_policy import HFPolicy, hf_policy_config, load_hf_policy
from slipstream.models.lora import value_of
from slipstream.models.policy import (
    add_end_tokens,
    load_policy,
    load_weights,
    load_weights_from,
    policy_config,
    policy_weights,
    save_policy,
)
from tests.models.helpers import load_theirs, make_decoder, random_ids, their_logits
from tests.models.hf_policies import KINDS, make_hf_policy, save_hf_policy


def gradients(model: HFPolicy) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_match_transformers(kind: str, tmp_path: Path) -> None:
    save_hf_policy(kind, tmp_path)
    ours, theirs = load_hf_policy(tmp_path), load_theirs(tmp_path)
    short, long = random_ids(1, 21, seed=1), random_ids(1, 60, seed=2)
    # Padding on the right reaches beyond the longest sequence and beyond gpt2's positions.
    ids = torch.zeros(2, 112, dtype=torch.int64)
    ids[0, :21], ids[1, :60] = short[0], long[0]
    weights = torch.randn(2, 60, 96, generator=torch.Generator().manual_seed(3))
    logits = ours.pack(torch.float32).forward(ids, torch.arange(112).expand(2, -1)).final
    assert logits.shape == (2, 112, 96)
    assert 0.05 < float(logits[1, :60].detach().std()) < 20
    for row, own in ((0, short), (1, long)):
        expected = their_logits(theirs, own)[0]
        torch.testing.assert_close(logits[row, : own.shape[1]], expected, atol=2e-5, rtol=1e-5)
    loss = (logits[0, :21] * weights[0, :21]).sum() + (logits[1, :60] * weights[1]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for row, own in ((0, short), (1, long)):
        (theirs(input_ids=own).logits[0] * weights[row, : own.shape[1]]).sum().backward()
    found = gradients(ours)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-3, rtol=1e-3)


def test_recompute_uses_gradient_checkpointing_without_dropout(tmp_path: Path) -> None:
    """Checkpointing needs training mode, in which gpt2 would normally apply dropout."""
    model = load_hf_policy(save_hf_policy("gpt2", tmp_path))
    assert model.supports_checkpointing
    ids, calls = random_ids(2, 30), [0]
    block = model.model.transformer.h[0].mlp
    block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    found = []
    for recompute in (False, True, True):
        calls[0] = 0
        packed = model.pack(torch.float32)
        packed.forward(ids, ids, recompute=recompute).final.square().sum().backward()  # type: ignore[no-untyped-call]
        assert calls[0] == 1 + recompute
        assert not model.model.training
        found.append(gradients(model))
    hooks = [hook for module in model.model.modules() for hook in module._forward_hooks]
    assert len(hooks) <= 1
    for again in found[1:]:
        assert all(torch.equal(gradient, again[name]) for name, gradient in found[0].items())


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mixtral"])
def test_saved_policies_load_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    model = load_policy(save_hf_policy(kind, tmp_path / "first"))
    assert isinstance(model, HFPolicy)
    assert model.config == policy_config(tmp_path / "first") == hf_policy_config(tmp_path / "first")
    assert (model.config.family, model.config.vocab_size) == (kind, 96)
    assert (model.config.eos_token_ids, model.config.pad_token_id) == ((2,), 0)
    limit = 100 if kind == "gpt2" else 256
    assert model.config.context_limit.tokens == limit
    seen: list[str] = []
    save_policy(model, tmp_path / "second", save_tokenizer=seen.append)
    assert seen == [str(tmp_path / "second")]
    ids = random_ids(2, 40)
    assert torch.equal(
        their_logits(load_theirs(tmp_path / "second"), ids),
        their_logits(load_theirs(tmp_path / "first"), ids),
    )
    other = load_hf_policy(save_hf_policy(kind, tmp_path / "other", seed=1))
    load_weights_from(other, tmp_path / "second")
    kept = {name: tensor.clone() for name, tensor in model.weights()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in other.weights())
    # Tied weights have only one name.
    assert (kind == "mixtral") == ("lm_head.weight" in kept)
    save_policy(model, tmp_path / "half", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    # Saving in bf16 converts a copy.
    assert next(model.parameters()).dtype == torch.float32


def test_added_end_tokens_are_saved(tmp_path: Path) -> None:
    model = load_policy(save_hf_policy("gpt2", tmp_path / "first"))
    assert model.config.eos_token_ids == (2,)
    add_end_tokens(model, [2, 5])
    for name, dtype in (("second", torch.float32), ("half", torch.bfloat16)):
        save_policy(model, tmp_path / name, dtype=dtype)
        assert policy_config(tmp_path / name).eos_token_ids == (2, 5)
        kept = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert kept["eos_token_id"] == [2, 5]


def test_weights_are_checked_before_any_is_changed(tmp_path: Path) -> None:
    model = load_hf_policy(save_hf_policy("gpt2", tmp_path))
    good = {name: tensor.detach() + 1 for name, tensor in model.weights()}
    norm = "transformer.ln_f.weight"
    before = {name: tensor.clone() for name, tensor in model.weights()}
    for broken, message in (
        ({k: v for k, v in good.items() if k != norm}, f"given: tensor {norm} is missing"),
        ({**good, "extra": torch.ones(1)}, "given: tensor extra is not part of this model"),
        ({**good, norm: torch.ones(3)}, r"has shape \(3,\), expected \(32,\)"),
        ({**good, norm: torch.full((32,), torch.nan)}, "has NaN or infinite values"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_weights(model, broken, source="given")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.weights())
    load_weights(model, good, source="given")
    assert all(torch.equal(good[name], value_of(weight)) for name, weight in policy_weights(model))


def test_master_weights_stay_fp32_if_computing_in_bf16(tmp_path: Path) -> None:
    model = load_hf_policy(save_hf_policy("gemma2", tmp_path))
    ids = random_ids(1, 20)
    plain = model.pack(torch.float32).forward(ids, ids).final
    rounded = model.pack(torch.bfloat16).forward(ids, ids).final
    assert not torch.equal(plain, rounded.float())
    torch.testing.assert_close(plain, rounded.float(), atol=0.2, rtol=0.1)
    rounded.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    copied = model.copy_as(torch.bfloat16)
    # Rotary frequencies are buffers, not weights.
    assert {b.dtype for n, b in copied.named_buffers() if "inv_freq" in n} == {torch.float32}
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["decoder", KINDS[-1]])
def test_positions_replace_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    if kind == "decoder":
        save_policy(make_decoder(), tmp_path)
    else:
        save_hf_policy(kind, tmp_path)
    before = policy_config(tmp_path).context_limit.tokens
    longer = 2 * before
    config = policy_config(tmp_path, positions=longer)
    assert config.context_limit.tokens == longer
    assert config.context_limit.of_config
    policy = load_policy(tmp_path, positions=longer)
    assert policy.config.context_limit.tokens == longer
    token_ids = random_ids(1, before + 5, seed=4)
    packed = policy.pack(torch.float32)
    at = torch.arange(before + 5)[None]
    logits = packed.forward(token_ids, at).final
    assert bool(logits.isfinite().all())
    # A saved policy keeps its new length.
    save_policy(policy, tmp_path / "saved")
    assert policy_config(tmp_path / "saved").context_limit.tokens == longer


def test_auto_selects_the_decoder_or_transformers(tmp_path: Path) -> None:
    save_policy(make_decoder("qwen3"), tmp_path / "ours")
    save_hf_policy("gpt2", tmp_path / "theirs")
    assert policy_config(tmp_path / "ours") == make_decoder("qwen3").config
    assert isinstance(load_policy(tmp_path / "ours", "transformers"), HFPolicy)
    assert isinstance(load_policy(tmp_path / "theirs"), HFPolicy)
    with pytest.raises(CheckpointError, match="model_type 'gpt2'"):
        load_policy(tmp_path / "theirs", "slipstream")


def rewrite(folder: Path, **change: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


def edit(folder: Path, **tensors: torch.Tensor | None) -> Path:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **tensors}
    save_file({n: t for n, t in kept.items() if t is not None}, path, {"format": "pt"})
    return folder


NORM = "transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: rewrite(f, model_type="gptx"),
            "transformers cannot load it (ValueError: The ch",
        ),
        (lambda f: rewrite(f, model_type="t5"), "has no causal language model of model_type 't5'"),
        (lambda f: rewrite(f, quantization_config={"bits": 4}), "quantized checkpoints are not"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not readable as JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "transformers cannot load it (OSError"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "transformers cannot load it ("),
        (lambda f: edit(f, **{NORM: None}), "missing weights transformer.ln_f.weight; they would"),
        (lambda f: edit(f, extra=torch.ones(1)), "unexpected weights extra; they would be lost"),
        (lambda f: edit(f, **{NORM: torch.ones(3)}), "transformers cannot load it (RuntimeError"),
        (lambda f: edit(f, **{NORM: torch.full((32,), torch.inf)}), "ln_f.weight has NaN or infi"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "transformers cannot load it (OSError",
        ),
    ],
)
def test_broken_folders_raise_an_error(damage: Any, message: str, tmp_path: Path) -> None:
    folder = save_hf_policy("gpt2", tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_policy(folder)
    assert str(caught.value).startswith(str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_causal_raises_an_error(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for causal in (False, True):
        config = BertConfig(vocab_size=96, intermediate_size=64, is_decoder=causal, **sizes)
        BertLMHeadModel(config).save_pretrained(str(tmp_path))
        if causal:
            assert load_hf_policy(tmp_path).config.family == "bert"
            continue
        with pytest.raises(CheckpointError, match=r"bert.*is_decoder, set it to true"):
            load_hf_policy(tmp_path)


def test_lengths_and_aux_layers_raise_an_error() -> None:
    from transformers import GPT2LMHeadModel

    model = make_hf_policy("gpt2")
    assert isinstance(model, GPT2LMHeadModel)
    config = foreign_config_of(model)
    packed = HFPolicy(model, config).pack(torch.float32)
    for more in ({"lengths": [4]}, {"aux_layers": (0,)}):
        with pytest.raises(ValueError, match="padded sequences"):
            packed.forward(random_ids(1, 4), random_ids(1, 4), **more)


def foreign_config_of(model: Any) -> Any:
    from slipstream.models.config import ContextLimit
    from slipstream.models.hf_policy import HFPolicyConfig

    return HFPolicyConfig(
        family=model.config.model_type, vocab_size=96, context_limit=ContextLimit(100, "short")
    )
