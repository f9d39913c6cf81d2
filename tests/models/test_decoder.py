"""The decoder: forward pass, initialization, auxiliary layers and the rules of exact mode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.models import Decoder, numerics
from slipstream.models.attention import (
    SCORE_BOUND,
    Order,
    as_context,
    attend,
    causal_mask,
    fold_queries,
    padded_keys,
    path_mask,
    unfold_queries,
)
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.decoder import without_init
from slipstream.models.functional import add_norm
from slipstream.models.heads import ValueHead
from slipstream.models.numerics import check_widths, dtype_from_name, pad_rows, round_up
from tests.models.helpers import config, logits, make_decoder, random_ids


def test_attention_is_softmax_attention(dtype: torch.dtype) -> None:
    B, H, G, T, K = 2, 2, 3, 10, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, T, K, generator=generator).to(dtype) for n in (H * G, H, H))
    S = padded_keys(T, dtype, torch.device("cpu"))
    mask = causal_mask(torch.arange(T).expand(B, -1), S, H, G)
    keys, values = (F.pad(x, (0, 0, 0, S - T)).flatten(0, 1) for x in (k, v))
    out = attend(fold_queries(q.transpose(1, 2), H), as_context(keys, values), mask)
    got = unfold_queries(out, T, H, G).view(B, T, H * G, K).transpose(1, 2)
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    assert float((got.double() - expected).abs().max()) < tolerance


def test_attention_over_a_tree_path_equals_attention_over_a_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    H, G, K, S, stem = 2, 2, 16, 128, 70
    q, k, v = (torch.randn(1, n, S, K, generator=generator) for n in (H * G, H, H))
    # After the first 70 tokens: two nodes at position 70, and a child of the second at 71.
    paths = torch.tensor([[[stem, 0, 0, 0], [stem, 70, 0, 0], [stem, 71, 0, 0], [stem, 71, 72, 0]]])
    positions = torch.tensor([[69, 70, 70, 71]])
    context = as_context(k.flatten(0, 1), v.flatten(0, 1))
    queries = fold_queries(q[:, :, :4].transpose(1, 2), H)
    order = Order.of(paths, positions, S, H, G)
    expected = attend(queries, context, causal_mask(positions, S, H, G), order=order)
    found = attend(queries, context, path_mask(paths, S, H, G))
    assert float((found - expected).abs().max()) < 1e-6
    assert not torch.allclose(found, attend(queries, context, causal_mask(positions, S, H, G)))


def test_later_tokens_do_not_affect_earlier_states(dtype: torch.dtype) -> None:
    ids = random_ids(3, 40)
    packed = make_decoder("qwen3").pack(dtype)
    positions = torch.arange(40)
    with torch.no_grad():
        together = packed.forward(ids, positions.expand(3, -1)).final
        for length in (4, 12, 36):
            alone = packed.forward(ids[1:2, :length], positions[None, :length]).final
            assert torch.equal(alone[0], together[1, :length])
        changed = ids.clone()
        changed[:, 20] = (changed[:, 20] + 1) % 96
        after = packed.forward(changed, positions.expand(3, -1)).final
    assert torch.equal(after[:, :20], together[:, :20])
    assert not torch.equal(after[:, 20], together[:, 20])
    assert not torch.equal(after[:, 30], together[:, 30])


def test_positions_beyond_the_context_limit_raise_an_error() -> None:
    packed = make_decoder("qwen2", max_position_embeddings=8).pack(torch.float32)
    with pytest.raises(IndexError, match="position 11: the model has max_position_embeddings=8"):
        packed.forward(random_ids(1, 12), torch.arange(12)[None])


@pytest.mark.usefixtures("without_kernels")
def test_key_places_raise_an_error_without_kernels() -> None:
    packed = make_decoder("qwen3").pack(torch.float32)
    c = packed.config
    data = torch.zeros(c.num_layers, 2, 1, c.num_kv_heads, 64, c.head_dim)
    rows, slots = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    places = KeyBlocks.contiguous(data).places(rows, slots, 4)
    with pytest.raises(ValueError, match="compiled kernels"):
        packed.forward(random_ids(1, 4), slots[None], kv_cache=places)


def test_aux_layers_are_the_inputs_of_layers() -> None:
    packed = make_decoder("llama").pack(torch.float32)
    ids, positions = random_ids(1, 8), torch.arange(8)[None]
    with torch.no_grad():
        aux_layers = packed.forward(ids, positions, aux_layers=(0, 2)).aux_layers
        # The third layer's input is the output of a decoder with the first two layers.
        shallow = replace(packed, layers=packed.layers[:2], fused=None)
        final = shallow.forward(ids, positions).final
    assert aux_layers is not None
    first, third = aux_layers.chunk(2, -1)
    assert torch.equal(first, packed.embedding[ids])
    assert torch.equal(add_norm(third[0], None, packed.norm, packed.eps)[1], final[0])


def test_gradients_reach_every_parameter_and_checkpointing_keeps_them() -> None:
    decoder = make_decoder("qwen2", tie_word_embeddings=True)
    grads = []
    for recompute in (False, True):
        decoder.zero_grad()
        packed = decoder.pack(torch.float32)
        out = packed.forward(random_ids(2, 8), torch.arange(8).expand(2, -1), recompute=recompute)
        (out.final @ packed.lm_head.weight.T).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
        grads.append({n: p.grad for n, p in decoder.named_parameters()})
    for name, grad in grads[0].items():
        other = grads[1][name]
        assert grad is not None, name
        assert other is not None
        # A constant added to all keys does not change a softmax, so their bias has no gradient.
        if not name.endswith("k_proj.bias"):
            assert float(grad.abs().max()) > 1e-3, name
        assert torch.equal(grad, other), name


def test_initialization_depends_only_on_the_seed() -> None:
    first, again, other = (Decoder(config("qwen2", hidden_size=64, head_dim=16)) for _ in range(3))
    first.init_weights(1)
    again.init_weights(1)
    other.init_weights(2)
    for name, parameter in first.named_parameters():
        same, different = again.get_parameter(name), other.get_parameter(name)
        assert torch.equal(parameter, same)
        if parameter.ndim == 2:
            assert not torch.equal(parameter, different)
            std = 0.02 / (
                math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            )
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
        else:
            assert parameter.unique().tolist() == ([0.0] if name.endswith("bias") else [1.0])  # type: ignore[no-untyped-call]


def test_the_vocabulary_may_have_any_size() -> None:
    decoder = make_decoder(vocab_size=101)
    assert logits(decoder, random_ids(1, 8)).shape == (1, 8, 101)


def test_exact_mode_requires_multiples_of_sixteen() -> None:
    check_widths(hidden_size=16, head_dim=128)
    with pytest.raises(ConfigError, match=r"head_dim=24 is not a multiple of 16.*name=hf"):
        check_widths(hidden_size=64, head_dim=24)


def test_dtypes_are_found_by_name() -> None:
    cpu = torch.device("cpu")
    assert dtype_from_name("bfloat16", cpu) == torch.bfloat16
    assert dtype_from_name("float32", cpu) == torch.float32
    assert dtype_from_name("auto", cpu) in (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="'float16' is not one of auto, bfloat16, float32"):
        dtype_from_name("float16", cpu)


def test_rows_are_padded_with_copies_of_the_first() -> None:
    x = torch.arange(10.0).view(5, 2)
    padded = pad_rows(x)
    assert padded.shape == (8, 2)
    assert torch.equal(padded[5:], x[:1].expand(3, -1))
    assert pad_rows(x[:4]) is not None
    assert pad_rows(x[:4]).shape == (4, 2)
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_keys_are_padded_to_chunks_or_to_steps_if_that_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert padded_keys(513, torch.bfloat16, cpu) == 528
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr("slipstream.models.numerics.kernels_supported", lambda: False)
        assert padded_keys(513, torch.bfloat16, cpu) == 1024
    for exact, padded in ((True, [16, 16, 128, 144]), (False, [128, 128, 128, 256])):
        monkeypatch.setattr(numerics, "partial_chunks_are_exact", lambda exact=exact: exact)
        assert [padded_keys(n, torch.float32, cpu) for n in (0, 16, 129)] == [16, 16, 144]
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("slipstream.models.numerics.kernels_supported", lambda: False)
            assert [padded_keys(n, torch.float32, cpu) for n in (0, 16, 128, 129)] == padded


def test_a_new_value_head_is_zero() -> None:
    head = ValueHead(8)
    values = head(torch.randn(2, 3, 8, dtype=torch.bfloat16))
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(2, 3))


def test_attention_without_the_maximum_is_correct_for_bounded_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 16, 16, generator=generator) for _ in range(3))
    q, k = (x * 13 / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
    mask = causal_mask(torch.arange(16)[None], 16, 2, 1)
    context = as_context(k, v)
    assert float((q @ context.keys_NKS).abs().max()) / 4 > 30
    torch.testing.assert_close(
        attend(q, context, mask, bounded=True), attend(q, context, mask), rtol=1e-5, atol=1e-6
    )


def test_scores_are_bounded_if_the_gains_of_query_and_key_norms_are_small() -> None:
    assert not any(
        layer.bounded_scores for layer in make_decoder("qwen2").pack(torch.float32).layers
    )
    decoder = make_decoder("qwen3")
    assert all(layer.bounded_scores for layer in decoder.pack(torch.float32).layers)
    largest = SCORE_BOUND / decoder.config.head_dim**0.5
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.fill_(0.01 - largest)
            if name.endswith("k_norm.weight"):
                parameter.fill_(1.0)
            if name == "model.layers.1.self_attn.k_norm.weight":
                parameter[3] = -1.1
    bounded = [layer.bounded_scores for layer in decoder.pack(torch.float32).layers]
    assert bounded[:2] == [True, False]


def test_weights_that_a_checkpoint_replaces_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[type[nn.Module]]()
    for kind in (nn.Linear, nn.Embedding):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: drawn.append(type(self)))
    with without_init():
        Decoder(config("llama"))
    assert not drawn
    Decoder(config("llama"))
    # Embedding, LM head, and seven matrices in each layer.
    assert len(drawn) == 2 + 7 * config("llama").num_layers
