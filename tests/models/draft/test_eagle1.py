"""The EAGLE-1 head: parameter names, initial weights, and unrolled chains."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from slipstream.models.draft import model
from slipstream.models.draft.eagle1 import DraftHead
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


def test_a_new_head_returns_nearly_its_input_feature() -> None:
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


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_chains_of_concatenated_sequences_equal_those_of_separate_ones(
    dtype: torch.dtype, close: float
) -> None:
    head = DraftHead(config("qwen3", hidden_size=64, head_dim=16))
    head.init_weights(0)
    lengths, c = [5, 40, 17, 1], head.config
    ids, features = random_ids(1, sum(lengths)), torch.randn(1, sum(lengths), c.hidden_size)
    embedding, packed = torch.randn(c.vocab_size, c.hidden_size), head.pack(dtype)
    with torch.no_grad():
        together = list(packed.unroll(ids, features, embedding, 4, lengths=lengths))
        for start, length in zip((0, 5, 45, 62), lengths, strict=True):
            own = slice(start, start + length)
            # By torch's operations, with padding.
            with patch.object(model, "supports_varlen", lambda *_: False):
                alone = list(packed.unroll(ids[:, own], features[:, own], embedding, 4))
            for k in range(4):
                meant = max(length - k, 0)
                torch.testing.assert_close(
                    together[k][:, own][:, :meant], alone[k][:, :meant], rtol=0, atol=close
                )
    for wrong in ([5, 40, 17], [5, 40, 18, 0]):
        with pytest.raises(ValueError, match=r"shape \(1, 63\)"):
            list(packed.unroll(ids, features, embedding, 1, lengths=wrong))
    with (
        pytest.raises(ValueError, match="leave lengths=None"),
        patch.object(model, "supports_varlen", lambda *_: False),
    ):
        list(packed.unroll(ids, features, embedding, 2, lengths=lengths))


@pytest.mark.parametrize(
    ("family", "dtype", "close"),
    [
        ("qwen2", torch.float32, 1e-4),
        ("qwen3", torch.float32, 1e-4),
        ("qwen3", torch.bfloat16, 0.03),
    ],
)
def test_gradients_of_chains_equal_those_of_separate_sequences(
    family: str, dtype: torch.dtype, close: float
) -> None:
    """Compares concatenated sequences by kernels with single ones by torch's operations in fp32."""
    decoder = make_decoder(family, hidden_size=64, head_dim=16, num_heads=4)
    head, lengths, steps = DraftHead(decoder.config), [5, 40, 17, 1], 3
    head.init_weights(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    D, total = decoder.config.hidden_size, sum(lengths)
    ids, features = random_ids(1, total), torch.randn(1, total, D)
    embedding, upstream = torch.randn(decoder.config.vocab_size, D), torch.randn(steps, total, D)
    # Entries past the end of a sequence are arbitrary, so they get no gradient.
    for k in range(steps):
        for end, length in zip((5, 45, 62, 63), lengths, strict=True):
            upstream[k, max(end - k, end - length) : end] = 0

    def gradients(of: torch.dtype, parts: list[slice], by_kernels: bool) -> dict[str, torch.Tensor]:
        head.zero_grad()
        packed, given = head.pack(of), features.clone().requires_grad_()
        for own in parts:
            alone = {} if len(parts) > 1 else {"lengths": lengths}
            with patch.object(model, "supports_varlen", lambda *_: by_kernels):
                chains = packed.unroll(ids[:, own], given[:, own], embedding, steps, **alone)
                loss = sum((w[own] * x[0]).sum() for w, x in zip(upstream, chains, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert given.grad is not None
        found = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
        return found | {"features": given.grad}

    each = [slice(0, 5), slice(5, 45), slice(45, 62), slice(62, 63)]
    together = gradients(dtype, [slice(0, total)], True)
    alone = gradients(torch.float32, each, False)
    assert together.keys() == alone.keys() == {*dict(head.named_parameters()), "features"}
    for name, expected in alone.items():
        off = (together[name] - expected).norm() / expected.norm()
        assert float(off) < close, name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_unrolled_chains_equal_chains_drafted_token_by_token(family: str) -> None:
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
