"""Layers by compiled kernels.

They match torch's operations up to rounding, with gradients. One call for all layers gives the same
bits as one call per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from slipstream.kernels.team import SHARED_FROM
from slipstream.models import decoder as decoder_module
from slipstream.models import functional
from slipstream.models.attention import TorchAttention
from slipstream.models.cpu_attention import CpuAttention, supports_attention
from slipstream.models.functional import add_norm, gated, rms_norm
from tests.models.helpers import FAMILIES, config, make_decoder, random_ids


@contextmanager
def torch_alone() -> Iterator[None]:
    with (
        patch.object(functional, "has_kernels", lambda *_: False),
        patch.object(decoder_module, "has_kernels", lambda *_: False),
    ):
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [4, 36, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_for_all_layers_equals_one_call_per_layer(
    family: str, length: int, dtype: torch.dtype
) -> None:
    packed = make_decoder(family).pack(dtype)
    ids, positions = random_ids(3, length), torch.arange(length).expand(3, -1)
    with torch.no_grad():
        at_once = packed.forward(ids, positions).final
        one_by_one = replace(packed, fused=None).forward(ids, positions).final
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(at_once, packed.forward(ids, positions).final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aux_layers", [(0,), (1, 2), (0, 2, 3)])
@pytest.mark.parametrize("lengths", [[3], [12, 9, 15, 12, 60, 1]])
def test_aux_layers_of_one_call_equal_those_of_one_call_per_layer(
    dtype: torch.dtype, aux_layers: tuple[int, ...], lengths: list[int]
) -> None:
    # A head width of 32, which AMX supports.
    decoder = make_decoder("qwen3", num_layers=4, hidden_size=64, head_dim=32)
    packed = decoder.pack(dtype)
    ids = random_ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        plain = packed.forward(ids, positions, lengths=lengths)
        at_once = packed.forward(ids, positions, lengths=lengths, aux_layers=aux_layers)
        one_by_one = replace(packed, fused=None).forward(
            ids, positions, lengths=lengths, aux_layers=aux_layers
        )
    with_gradients = decoder.pack(dtype).forward(
        ids, positions, lengths=lengths, aux_layers=aux_layers
    )
    assert plain.aux_layers is None
    assert torch.equal(plain.final, at_once.final)
    assert at_once.aux_layers is not None
    assert at_once.aux_layers.shape == (1, sum(lengths), len(aux_layers) * 64)
    for other in (one_by_one, with_gradients):
        assert other.aux_layers is not None
        assert not other.aux_layers.requires_grad
        assert torch.equal(at_once.aux_layers, other.aux_layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [4, 131])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (6, 3, 32), (4, 2, 8)])
def test_results_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, length: int, heads: int, kv_heads: int, width: int
) -> None:
    # Each thread norms all rows if they are few, else its share. Two threads cannot share three
    # heads, and a head width of 8 does not fill a panel.
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width}
    decoder = make_decoder("qwen3", num_layers=4, hidden_size=64, **shape)
    packed = decoder.pack(dtype)
    assert packed.fused is None or packed.fused.size > SHARED_FROM
    ids, positions = random_ids(3, length), torch.arange(length).expand(3, -1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                states = packed.forward(ids, positions, aux_layers=(0, 2))
            assert states.aux_layers is not None
            found.append(torch.cat([states.final, states.aux_layers], -1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_aux_layers_must_be_ascending_layer_indices() -> None:
    packed = make_decoder("qwen3").pack(torch.float32)
    for aux_layers in ((3,), (-1, 0), (1, 1), (2, 1)):
        with torch.no_grad(), pytest.raises(ValueError, match="of 3 layers"):
            packed.forward(random_ids(1, 4), torch.arange(4)[None], aux_layers=aux_layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [False, True])
def test_concatenated_sequences_give_the_results_of_separate_ones(
    dtype: torch.dtype, gradients: bool
) -> None:
    # A head width of 32, which AMX supports.
    decoder = make_decoder("qwen3", head_dim=32)
    lengths = [5, 1, 70, 33, 32]
    texts = [random_ids(1, length, seed=length) for length in lengths]
    positions = [torch.arange(length)[None] for length in lengths]
    weights = [torch.randn(length, decoder.config.hidden_size) for length in lengths]

    def found(final: Tensor) -> dict[str, Tensor]:
        decoder.zero_grad()
        loss = (final[0] * torch.cat(weights)).sum()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}

    with torch.set_grad_enabled(gradients):
        packed = decoder.pack(dtype)
        together = packed.forward(torch.cat(texts, 1), torch.cat(positions, 1), lengths=lengths)
        alone = [packed.forward(*of).final for of in zip(texts, positions, strict=True)]
        assert torch.equal(together.final, torch.cat(alone, 1))
        if gradients:
            expected, ours = found(torch.cat(alone, 1)), found(together.final)
            assert len(expected) > 20
            for name, gradient in expected.items():
                close = 1e-5 if dtype == torch.float32 else 2**-6
                error = (ours[name] - gradient).norm() / gradient.norm()
                assert error < close, (name, error)


def test_lengths_must_add_up_to_the_tokens() -> None:
    packed = make_decoder("qwen3").pack(torch.float32)
    ids, positions = random_ids(1, 8), torch.arange(8)[None]
    for lengths in ([4, 3], [8, 0]):
        with pytest.raises(ValueError, match="do not add up"):
            packed.forward(ids, positions, lengths=lengths)
    with torch_alone(), pytest.raises(ValueError, match="leave lengths=None"):
        packed.forward(ids, positions, lengths=[8])


@pytest.mark.parametrize("width", [{"hidden_size": 40}, {"intermediate_size": 36}])
def test_widths_that_do_not_fill_panels_run_layer_by_layer(width: dict[str, int]) -> None:
    decoder = make_decoder("llama", **width)
    packed = decoder.pack(torch.float32)
    assert packed.fused is None
    ids, positions = random_ids(2, 8), torch.arange(8).expand(2, -1)
    with torch.no_grad():
        ours = packed.forward(ids, positions).final
        with torch_alone():
            theirs = decoder.pack(torch.float32).forward(ids, positions).final
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_torch_agree_up_to_rounding(family: str) -> None:
    packed = make_decoder(family).pack(torch.float32)
    ids, positions = random_ids(2, 60), torch.arange(60).expand(2, -1)
    with torch.no_grad():
        ours = packed.forward(ids, positions).final
        with torch_alone():
            theirs = packed.forward(ids, positions).final
    assert not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_kernel_attention_and_its_gradients_match_torch(
    family: str, dtype: torch.dtype, close: float
) -> None:
    c = config(family, head_dim=16)
    assert supports_attention(c, dtype)
    assert not supports_attention(config(family, head_dim=24), torch.bfloat16)
    Q, H, K = c.num_heads, c.num_kv_heads, c.head_dim
    B, T = 3, 20
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B * T, (Q + 2 * H) * K, generator=generator, requires_grad=True)
    norms = None
    if c.qk_norm:
        norms = (1 + 0.2 * torch.randn(Q + H, K, generator=generator)).requires_grad_()
    eps = torch.full((), c.rms_norm_eps)
    positions = torch.arange(T).expand(B, -1)
    upstream = torch.randn(B * T, Q * K, generator=generator)
    inputs = [qkv] if norms is None else [qkv, norms]
    found = []
    for attention in (
        CpuAttention(c, eps, positions, dtype),
        TorchAttention(c, eps, positions, torch.float32),
    ):
        out = attention(0, qkv, norms, False)
        found.append([out, *torch.autograd.grad((out * upstream).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < close


@pytest.mark.parametrize("width", [16, 48, 77])
@pytest.mark.parametrize("with_delta", [True, False])
def test_gradients_of_the_norm_match_torch(width: int, with_delta: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    x, delta = torch.randn(2, 40, width, generator=generator).requires_grad_().unbind()
    weight = torch.randn(width, generator=generator, requires_grad=True)
    eps = torch.full((), 1e-5)
    up, up_total = torch.randn(2, 40, width, generator=generator).unbind()
    inputs = [x, delta, weight] if with_delta else [x, weight]
    total, normed = add_norm(x, delta if with_delta else None, weight, eps)
    ours = torch.autograd.grad((normed * up).sum() + (total * up_total).sum(), inputs)
    summed = x + delta if with_delta else x
    theirs_normed = rms_norm(summed, weight, eps)
    theirs = torch.autograd.grad((theirs_normed * up).sum() + (summed * up_total).sum(), inputs)
    torch.testing.assert_close(total, summed)
    torch.testing.assert_close(normed, theirs_normed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_the_gate_match_torch() -> None:
    both = torch.randn(30, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = torch.randn(30, 48, generator=torch.Generator().manual_seed(1))
    gate, up = both.chunk(2, -1)
    theirs = torch.nn.functional.silu(gate) * up
    ours = gated(both)
    torch.testing.assert_close(ours, theirs)
    (a,), (b,) = (torch.autograd.grad((y * upstream).sum(), both) for y in (ours, theirs))
    torch.testing.assert_close(a, b)


def test_nan_affects_only_its_own_sequence() -> None:
    packed = make_decoder("qwen3").pack(torch.float32)
    ids, positions = random_ids(3, 12), torch.arange(12).expand(3, -1)
    packed.embedding.data = packed.embedding.data.clone()
    with torch.no_grad():
        before = packed.forward(ids, positions).final
        # A token that occurs nowhere else in the batch.
        marked = ids.clone()
        marked[1, 5] = 95
        packed.embedding[95] = float("nan")
        after = packed.forward(marked, positions).final
    others = ~(marked == 95).any(-1) & ~(ids == 95).any(-1)
    assert bool(after[1, 5:].isnan().all())
    assert torch.equal(after[1, :5], before[1, :5])
    assert bool(others[[0, 2]].any())
    assert torch.equal(after[others], before[others])
