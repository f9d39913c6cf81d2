"""The EAGLE-3 head: parameter names, chains by kernels and by torch, and error messages."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from unittest.mock import patch

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft import model
from slipstream.models.draft.eagle3 import Eagle3Head, default_aux_layers
from slipstream.models.draft.forward import DraftPass
from slipstream.models.functional import rms_norm
from tests.models.helpers import VOCAB, config, make_decoder, random_ids

AUX_LAYERS = (0, 1, 2)
WIDTHS = {"hidden_size": 64, "head_dim": 16, "num_heads": 4}


def made(seed: int = 2, tokens: list[int] | None = None, **more: object) -> Eagle3Head:
    """Return a head in which every parameter matters."""
    head = Eagle3Head(config("qwen3", **{**WIDTHS, **more}), AUX_LAYERS, tokens)
    head.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return head


def test_names_are_those_of_published_heads() -> None:
    head = Eagle3Head(config("qwen2"), AUX_LAYERS, [3, 5, 90])
    shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()}
    # A Llama layer for every family of policy: no biases, no query and key norms.
    assert shapes == {
        "fc.weight": (48, 144),
        "midlayer.hidden_norm.weight": (48,),
        "midlayer.input_layernorm.weight": (48,),
        "midlayer.self_attn.q_proj.weight": (48, 96),
        "midlayer.self_attn.k_proj.weight": (16, 96),
        "midlayer.self_attn.v_proj.weight": (16, 96),
        "midlayer.self_attn.o_proj.weight": (48, 48),
        "midlayer.post_attention_layernorm.weight": (48,),
        "midlayer.mlp.gate_proj.weight": (80, 48),
        "midlayer.mlp.up_proj.weight": (80, 48),
        "midlayer.mlp.down_proj.weight": (48, 80),
        "norm.weight": (48,),
        "lm_head.weight": (3, 48),
    }


def test_a_new_head_drafts_with_the_policys_norm_and_lm_head() -> None:
    policy = make_decoder("qwen3")
    head = Eagle3Head(policy.config, AUX_LAYERS, [3, 5, 90])
    head.init_weights(0, policy)
    assert torch.equal(head.lm_head.weight, policy.lm_head_weight[[3, 5, 90]])
    assert torch.equal(head.norm.weight, policy.model.norm.weight)
    features = torch.randn(7, 3 * 48)
    with torch.no_grad():
        state = head.pack(torch.float32).to_states(features)
    assert float(torch.cosine_similarity(state, features[:, -48:], dim=-1).min()) > 0.9


@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_equals_the_formula(kernels: bool) -> None:
    """With a single token, attention returns the token's value."""
    head = made()
    c, ids = head.config, random_ids(1, 4)
    features, embedding = torch.randn(1, 4, 3 * 64), torch.randn(VOCAB, 64)
    with (
        torch.no_grad(),
        patch.object(model, "supports_varlen", lambda *_: kernels),
    ):
        packed = head.pack(torch.float32)
        state = next(packed.unroll(ids, features, embedding, 1))[0, :1]
        ours = packed.draft_logits(state, packed.lm_head)
        w, eps = head.state_dict(), torch.tensor(c.rms_norm_eps)
        g = features[0, :1] @ w["fc.weight"].T
        e = rms_norm(embedding[ids[0, :1]], w["midlayer.input_layernorm.weight"], eps)
        given = torch.cat([e, rms_norm(g, w["midlayer.hidden_norm.weight"], eps)], -1)
        value = given @ w["midlayer.self_attn.v_proj.weight"].T
        # Each key-value head serves a group of query heads.
        mixed = value.view(1, c.num_kv_heads, 1, -1).expand(-1, -1, c.group_size, -1).reshape(1, -1)
        x = g + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        normed = rms_norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
        up = normed @ w["midlayer.mlp.up_proj.weight"].T
        x = x + (gate * up) @ w["midlayer.mlp.down_proj.weight"].T
        theirs = rms_norm(x, w["norm.weight"], eps) @ w["lm_head.weight"].T
    torch.testing.assert_close(state, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_chains_and_gradients_equal_those_of_separate_sequences(
    dtype: torch.dtype, close: float
) -> None:
    """Compares concatenated sequences by kernels with single ones by torch's operations in fp32."""
    head, lengths, steps = made(tokens=[*range(0, VOCAB, 2)]), [5, 40, 17, 1], 3
    total = sum(lengths)
    ids, features = random_ids(1, total), torch.randn(1, total, 3 * 64)
    embedding, upstream = torch.randn(VOCAB, 64), torch.randn(steps, total, VOCAB // 2)
    # Entries past the end of a sequence are arbitrary, so they get no gradient.
    for k in range(steps):
        for end, length in zip((5, 45, 62, 63), lengths, strict=True):
            upstream[k, max(end - k, end - length) : end] = 0

    def found(of: torch.dtype, parts: list[slice], by_kernels: bool) -> dict[str, torch.Tensor]:
        head.zero_grad()
        packed, given = head.pack(of), features.clone().requires_grad_()
        logits = torch.zeros(steps, total, VOCAB // 2)
        for own in parts:
            alone = {} if len(parts) > 1 else {"lengths": lengths}
            with patch.object(model, "supports_varlen", lambda *_: by_kernels):
                chains = packed.unroll(ids[:, own], given[:, own], embedding, steps, **alone)
                drafts = [packed.draft_logits(x[0], packed.lm_head) for x in chains]
            loss = sum((w[own] * x).sum() for w, x in zip(upstream, drafts, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logits[:, own] = torch.stack(drafts).detach()
        assert given.grad is not None
        grads = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
        return grads | {"features": given.grad, "logits": logits * (upstream != 0)}

    each = [slice(0, 5), slice(5, 45), slice(45, 62), slice(62, 63)]
    together, alone = found(dtype, [slice(0, total)], True), found(torch.float32, each, False)
    assert together.keys() == alone.keys() == {*dict(head.named_parameters()), "features", "logits"}
    for name, expected in alone.items():
        off = (together[name] - expected).norm() / expected.norm()
        assert float(off) < close, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [True, False])
def test_drafting_column_by_column_equals_the_training_pass(
    dtype: torch.dtype, kernels: bool
) -> None:
    head, lengths = made(), [9, 7, 12]
    ids, features = random_ids(3, 12), torch.randn(3, 12, 3 * 64)
    with torch.no_grad():
        packed, embedding = head.pack(dtype), torch.randn(VOCAB, 64)
        assert packed.fused is not None
        if not kernels:
            packed = replace(packed, fused=None)
        expected = list(packed.unroll(ids, features, embedding, 3))
        states, own = packed.to_states(features), packed.config
        width = torch.float32 if dtype == torch.float32 else dtype
        kv = torch.full((2, 4, own.num_kv_heads, 64, own.head_dim), 7.0, dtype=width)
        if not kernels:
            kv = kv.float()
        starts = [length - 6 for length in lengths]
        cache = KeyBlocks.contiguous(kv[None]) if kernels else kv
        DraftPass(packed, embedding, cache, torch.arange(6).expand(3, -1), 6).run(
            0, ids[:, :6], states[:, :6]
        )
        slots = torch.tensor([list(range(start, start + 8)) for start in starts])
        run = DraftPass(packed, embedding, cache, slots, int(slots.max()) + 1)
        selected = torch.arange(3)[:, None], slots[:, :4]
        got = run.run(0, ids[selected], states[selected])
        close = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, expected[0][selected], rtol=close, atol=close)
        # From here on the head reads its own states, and the pass must not change them.
        state = got[:, -1:]
        for step in (1, 2):
            before = state.clone()
            nexts = ids[torch.arange(3)[:, None], slots[:, 3:4] + step]
            following = run.run(3 + step, nexts, state)
            assert torch.equal(state, before)
            at = torch.arange(3)[:, None], slots[:, 3:4]
            torch.testing.assert_close(following, expected[step][at], rtol=close, atol=close)
            state = following


def test_tokens_outside_the_draft_vocabulary_are_not_drafted() -> None:
    tokens = [1, 4, 90]
    with torch.no_grad():
        packed, states = made(tokens=tokens).pack(torch.float32), torch.randn(5, 64)
        own = packed.draft_logits(states, packed.lm_head)
        wide = packed.logits(states, packed.lm_head)
    assert wide.shape == (5, VOCAB)
    assert torch.equal(wide[:, tokens], own)
    others = [token for token in range(VOCAB) if token not in tokens]
    assert bool((wide[:, others] == -inf).all())


def test_default_aux_layers_are_those_of_vllm_and_sglang() -> None:
    assert default_aux_layers(12) == (2, 6, 9)
    assert default_aux_layers(7) == (2, 3, 4)
    with pytest.raises(ConfigError, match=r"2, 3 and 3 of 6.*spec_algorithm=EAGLE"):
        default_aux_layers(6)


@pytest.mark.parametrize("aux_layers", [(0, 1), (0, 1, 3), (-1, 0, 1), (0, 2, 1), (1, 1, 2), ()])
def test_invalid_aux_layers_raise_an_error(aux_layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"3 of 3 layers.*aux_hidden_state_layer_ids"):
        Eagle3Head(config("qwen3"), aux_layers)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "draft vocabulary has 0 tokens.*draft_vocab_size"),
        ([*range(VOCAB), 3], "draft vocabulary has 97 tokens.*draft_vocab_size.*policy's 96"),
        ([3, 3], "each once and in ascending order"),
        ([4, 3], "each once and in ascending order"),
        ([-1, 3], "policy's 96, each once"),
        ([3, 96], "policy's 96, each once"),
    ],
)
def test_invalid_draft_vocabularies_raise_an_error(tokens: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Head(config("qwen3"), AUX_LAYERS, tokens)


def test_heads_are_alike_if_their_weights_are_interchangeable() -> None:
    head = made(tokens=[1, 2])
    assert head.is_like(head.blank())
    assert not head.is_like(made(tokens=[1, 3]))
    assert not head.is_like(made())
    assert not head.is_like(Eagle3Head(config("qwen3", num_layers=4), (0, 1, 3), [1, 2]))
