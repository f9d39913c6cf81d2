"""The EAGLE-3 head: names, its chains by kernels and by torch's operations, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from unittest.mock import patch

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.models.draft import model
from slipstream.models.draft.eagle3 import Eagle3Head, default_aux_layers
from slipstream.models.draft.forward import DraftPass
from slipstream.models.functional import rms_norm
from tests.models.helpers import VOCAB, config, make_decoder, random_ids

AUX_LAYERS = (0, 1, 2)
WIDTHS = {"hidden_size": 64, "head_dim": 16, "num_heads": 4}


def made(seed: int = 2, tokens: list[int] | None = None, **more: object) -> Eagle3Head:
    """Every part of it matters."""
    head = Eagle3Head(config("qwen3", **{**WIDTHS, **more}), AUX_LAYERS, tokens)
    head.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return head


def test_names_are_those_of_published_heads() -> None:
    head = Eagle3Head(config("qwen2"), AUX_LAYERS, [3, 5, 90])
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    # Llama's layer, whatever the policy's family: no biases, no norms of queries and keys.
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
        state = head.pack(torch.float32).taken(features)
    assert float(torch.cosine_similarity(state, features[:, -48:], dim=-1).min()) > 0.9


@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_is_that_of_the_formula(kernels: bool) -> None:
    """One token alone: attention hands on its value."""
    head = made()
    c, ids = head.config, random_ids(1, 4)
    features, embedding = torch.randn(1, 4, 3 * 64), torch.randn(VOCAB, 64)
    with (
        torch.no_grad(),
        patch.object(model, "takes_sequences_in_a_row", lambda *_: kernels),
    ):
        packed = head.pack(torch.float32)
        state = next(packed.unroll(ids, features, embedding, 1))[0, :1]
        ours = packed.draft_logits(state, None)  # type: ignore[arg-type]
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
def test_chains_and_gradients_are_those_of_each_sequence(dtype: torch.dtype, close: float) -> None:
    """By kernels, several sequences in a row; and one by one in fp32, by torch's operations."""
    head, lengths, steps = made(tokens=[*range(0, VOCAB, 2)]), [5, 40, 17, 1], 3
    total = sum(lengths)
    ids, features = random_ids(1, total), torch.randn(1, total, 3 * 64)
    embedding, wanted = torch.randn(VOCAB, 64), torch.randn(steps, total, VOCAB // 2)
    # What is past the end means nothing.
    for k in range(steps):
        for end, length in zip((5, 45, 62, 63), lengths, strict=True):
            wanted[k, max(end - k, end - length) : end] = 0

    def found(of: torch.dtype, parts: list[slice], by_kernels: bool) -> dict[str, torch.Tensor]:
        head.zero_grad()
        packed, given = head.pack(of), features.clone().requires_grad_()
        logits = torch.zeros(steps, total, VOCAB // 2)
        for own in parts:
            alone = {} if len(parts) > 1 else {"lengths": lengths}
            with patch.object(model, "takes_sequences_in_a_row", lambda *_: by_kernels):
                chains = packed.unroll(ids[:, own], given[:, own], embedding, steps, **alone)
                drafts = [packed.draft_logits(x[0], None) for x in chains]  # type: ignore[arg-type]
            loss = sum((w[own] * x).sum() for w, x in zip(wanted, drafts, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logits[:, own] = torch.stack(drafts).detach()
        assert given.grad is not None
        grads = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
        return grads | {"features": given.grad, "logits": logits * (wanted != 0)}

    each = [slice(0, 5), slice(5, 45), slice(45, 62), slice(62, 63)]
    together, alone = found(dtype, [slice(0, total)], True), found(torch.float32, each, False)
    assert together.keys() == alone.keys() == {*dict(head.named_parameters()), "features", "logits"}
    for name, expected in alone.items():
        off = (together[name] - expected).norm() / expected.norm()
        assert float(off) < close, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [True, False])
def test_columns_one_by_one_are_what_training_computes_at_once(
    dtype: torch.dtype, kernels: bool
) -> None:
    head, lengths = made(), [9, 7, 12]
    ids, features = random_ids(3, 12), torch.randn(3, 12, 3 * 64)
    with torch.no_grad():
        packed, embedding = head.pack(dtype), torch.randn(VOCAB, 64)
        assert packed.together is not None
        if not kernels:
            packed = replace(packed, together=None)
        expected = list(packed.unroll(ids, features, embedding, 3))
        states, own = packed.taken(features), packed.config
        width = torch.float32 if dtype == torch.float32 else dtype
        kv = torch.full((2, 4, own.num_kv_heads, 64, own.head_dim), 7.0, dtype=width)
        if not kernels:
            kv = kv.float()
        starts = [length - 6 for length in lengths]
        DraftPass(packed, embedding, kv, torch.arange(6).expand(3, -1), 6).run(
            0, ids[:, :6], states[:, :6]
        )
        slots = torch.tensor([list(range(start, start + 8)) for start in starts])
        run = DraftPass(packed, embedding, kv, slots, int(slots.max()) + 1)
        picked = torch.arange(3)[:, None], slots[:, :4]
        got = run.run(0, ids[picked], states[picked])
        close = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, expected[0][picked], rtol=close, atol=close)
        # Its own states, unchanged by what follows, from the last of these on.
        state = got[:, -1:]
        for step in (1, 2):
            before = state.clone()
            nexts = ids[torch.arange(3)[:, None], slots[:, 3:4] + step]
            following = run.run(3 + step, nexts, state)
            assert torch.equal(state, before)
            at = torch.arange(3)[:, None], slots[:, 3:4]
            torch.testing.assert_close(following, expected[step][at], rtol=close, atol=close)
            state = following


def test_what_is_not_in_the_draft_vocabulary_is_not_drafted() -> None:
    tokens = [1, 4, 90]
    with torch.no_grad():
        packed, states = made(tokens=tokens).pack(torch.float32), torch.randn(5, 64)
        own = packed.draft_logits(states, None)  # type: ignore[arg-type]
        wide = packed.logits(states, None)  # type: ignore[arg-type]
    assert wide.shape == (5, VOCAB)
    assert torch.equal(wide[:, tokens], own)
    others = [token for token in range(VOCAB) if token not in tokens]
    assert bool((wide[:, others] == -inf).all())


def test_the_usual_aux_layers_are_those_of_the_engines() -> None:
    assert default_aux_layers(12) == (2, 6, 9)
    assert default_aux_layers(7) == (2, 3, 4)
    with pytest.raises(ConfigError, match=r"layers 2, 3 and 3 of 6.*spec_algorithm=EAGLE"):
        default_aux_layers(6)


@pytest.mark.parametrize("aux_layers", [(0, 1), (0, 1, 3), (-1, 0, 1), (0, 2, 1), (1, 1, 2), ()])
def test_aux_layers_that_cannot_be_are_refused(aux_layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"3 of the policy's 3 layers.*aux_hidden_state_layer"):
        Eagle3Head(config("qwen3"), aux_layers)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "draft vocabulary of 0 tokens.*draft_vocab_size"),
        ([*range(VOCAB), 3], "draft vocabulary of 97 tokens.*at most the policy's 96"),
        ([3, 3], "each once and from the lowest on"),
        ([4, 3], "each once and from the lowest on"),
        ([-1, 3], "some of the policy's 96 tokens"),
        ([3, 96], "some of the policy's 96 tokens"),
    ],
)
def test_draft_vocabularies_that_cannot_be_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Head(config("qwen3"), AUX_LAYERS, tokens)


def test_heads_are_alike_where_their_weights_mean_the_same() -> None:
    head = made(tokens=[1, 2])
    assert head.is_like(head.blank())
    assert not head.is_like(made(tokens=[1, 3]))
    assert not head.is_like(made())
    assert not head.is_like(Eagle3Head(config("qwen3", num_layers=4), (0, 1, 3), [1, 2]))
