"""The EAGLE head: names, its first weights, and its chains."""

from __future__ import annotations

import pytest
import torch

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
        out = next(head.pack(torch.float32).unroll(random_ids(2, 8), features, embedding, 1))
    similarity = torch.cosine_similarity(out, features, dim=-1)
    assert float(similarity.min()) > 0.9
    assert not torch.equal(out, features)


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
        for start in (0, 3, 11, T - steps):
            given = features[:, : start + 1]
            for step in range(steps):
                length = start + 1 + step
                width = -(-length // 4) * 4
                padded = torch.nn.functional.pad(ids[:, :length], (0, width - length))
                before = torch.nn.functional.pad(given, (0, 0, 0, width - length))
                out = next(packed.unroll(padded, before, embedding, 1))[:, length - 1]
                torch.testing.assert_close(unrolled[step][:, start], out, rtol=1e-4, atol=1e-5)
                given = torch.cat([given, out[:, None]], dim=1)
