"""The EAGLE head: names, its first weights, and its forward pass with and without a cache."""

from __future__ import annotations

import pytest
import torch

from slipstream.inference.engine.kv_cache import DecodeView, KVStore
from slipstream.models.draft_head import DraftHead
from tests.models.helpers import config, make_decoder, random_ids


def test_names_are_those_of_published_heads() -> None:
    names = set(DraftHead(config("llama")).state_dict())
    assert names == {
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert "layers.0.self_attn.q_norm.weight" in DraftHead(config("qwen3")).state_dict()


def test_a_new_head_nearly_hands_on_its_feature() -> None:
    head = DraftHead(config("qwen3"))
    head.init_weights(0)
    D = head.config.hidden_size
    features = torch.randn(2, 8, D)
    embedding = torch.randn(head.config.vocab_size, D)
    with torch.no_grad():
        out = head.pack(torch.float32).forward(
            random_ids(2, 8), features, torch.arange(8).expand(2, -1), embedding
        )
    similarity = torch.cosine_similarity(out, features, dim=-1)
    assert float(similarity.min()) > 0.9
    assert not torch.equal(out, features)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_cache_gives_what_one_pass_gives(family: str) -> None:
    decoder = make_decoder(family)
    head = DraftHead(decoder.config)
    head.init_weights(2)
    packed, c = head.pack(torch.float32), decoder.config
    ids, features = random_ids(4, 24), torch.randn(4, 24, c.hidden_size)
    embedding = decoder.model.embed_tokens.weight.detach()
    everywhere = torch.arange(24).expand(4, -1)
    store = KVStore(config(family, num_layers=1), torch.float32, torch.device("cpu"), 1 << 24)
    store.reserve(4, 24)
    with torch.no_grad():
        whole = packed.forward(ids, features, everywhere, embedding)
        for start, end in ((0, 11), (11, 12), (12, 20), (20, 24)):
            slots = everywhere[:, start:end]
            view = DecodeView(store, slots, end, start + 1)
            part = packed.forward(
                ids[:, start:end], features[:, start:end], slots, embedding, kv_cache=view
            )
            assert torch.equal(part, whole[:, start:end])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_unrolled_chains_are_those_that_go_one_by_one(family: str) -> None:
    decoder = make_decoder(family)
    head = DraftHead(decoder.config)
    head.init_weights(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    packed, c = head.pack(torch.float32), decoder.config
    T, steps = 20, 4
    ids, features = random_ids(2, T), torch.randn(2, T, c.hidden_size)
    embedding = decoder.model.embed_tokens.weight.detach()
    with torch.no_grad():
        unrolled = list(packed.unroll(ids, features, embedding, steps))
        torch.testing.assert_close(
            unrolled[0],
            packed.forward(ids, features, torch.arange(T).expand(2, -1), embedding),
        )
        for start in (0, 3, 11, T - steps):
            given = features[:, : start + 1]
            for step in range(steps):
                length = start + 1 + step
                width = -(-length // 4) * 4
                out = packed.forward(
                    torch.nn.functional.pad(ids[:, :length], (0, width - length)),
                    torch.nn.functional.pad(given, (0, 0, 0, width - length)),
                    torch.arange(width).expand(2, -1),
                    embedding,
                )[:, length - 1]
                torch.testing.assert_close(unrolled[step][:, start], out, rtol=1e-4, atol=1e-5)
                given = torch.cat([given, out[:, None]], dim=1)
