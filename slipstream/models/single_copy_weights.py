"""A decoder whose parameters are the packed weights themselves: one copy, in the compute dtype.

For an engine of a model so large that a second copy, or weights in fp32, would not fit. Only where
torch multiplies: kernels have a layout of their own. New weights are written straight into the ones
in use, so an update that turns out to be bad leaves a mixture behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from slipstream.models.decoder import Decoder, PackedDecoder
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels


def allocate_single_copy(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """`decoder`, which was made on the meta device, with room for weights in `dtype`; returns
    it."""
    return decoder.to(dtype).to_empty(device=device)


@torch.no_grad()
def pack_in_place(decoder: Decoder, dtype: torch.dtype) -> PackedDecoder:
    """`decoder.pack(dtype)`, of which the parameters become views; they are in `dtype` from then
    on.

    Raises:
        ValueError: kernels multiply here.
    """
    if has_kernels(activation_dtype(dtype, decoder.device), decoder.device):
        raise ValueError("compiled kernels keep weights in a layout of their own")
    decoder.to(dtype)
    packed = decoder.pack(dtype)
    for layer, w in zip(decoder.layers, packed.layers, strict=True):
        a, m = layer.self_attn, layer.mlp
        _view([a.q_proj, a.k_proj, a.v_proj], w.qkv)
        _view([m.gate_proj, m.up_proj], w.gate_up)
    return packed


@torch.no_grad()
def write(decoder: Decoder, packed: PackedDecoder, tensors: Mapping[str, Tensor]) -> None:
    """Give the decoder and `packed`, which `pack_in_place` made of it, new weights: all, or some of
    them."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
    for layer, w in zip(decoder.layers, packed.layers, strict=True):
        if w.qk_norm is not None:
            # The one thing that is no view: every head has the same gains.
            w.qk_norm.copy_(layer.qk_norm(decoder.config))


def _view(linears: Iterable[nn.Linear], joined: PackedLinear) -> None:
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = joined.weight[start:end]
        if joined.bias is not None:
            linear.bias.data = joined.bias[start:end]
        start = end
