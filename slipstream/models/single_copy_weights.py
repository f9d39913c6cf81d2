"""Single-copy weights: the decoder's parameters are views of its packed weights.

An engine uses this for a model so large that a second copy, or weights in fp32, would not fit in
memory. It works only if torch computes the matrix products, because the compiled kernels store
weights in their own layout. New weights overwrite the weights in use. So an update that fails
halfway leaves old and new weights mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from slipstream.models.decoder import Decoder, PackedDecoder
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels


def allocate_single_copy(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Allocate memory in `dtype` for `decoder`, which must be on the meta device. Return it."""
    return decoder.to(dtype).to_empty(device=device)


@torch.no_grad()
def pack_in_place(decoder: Decoder, dtype: torch.dtype) -> PackedDecoder:
    """Return `decoder.pack(dtype)` and turn the decoder's parameters into views of it.

    The parameters have the type `dtype` from then on.

    Raises:
        ValueError: the compiled kernels compute the matrix products on this device.
    """
    if has_kernels(activation_dtype(dtype, decoder.device), decoder.device):
        raise ValueError(
            f"single-copy weights need torch's matrix products, and for {dtype} on "
            f"{decoder.device} the compiled kernels compute them in their own weight layout"
        )
    decoder.to(dtype)
    packed = decoder.pack(dtype)
    for layer, w in zip(decoder.layers, packed.layers, strict=True):
        a, m = layer.self_attn, layer.mlp
        _view([a.q_proj, a.k_proj, a.v_proj], w.qkv)
        _view([m.gate_proj, m.up_proj], w.gate_up)
    return packed


@torch.no_grad()
def write(decoder: Decoder, packed: PackedDecoder, tensors: Mapping[str, Tensor]) -> None:
    """Copy new weights, all or some of them, into the decoder and into `packed`.

    `packed` must be what `pack_in_place` returned for this decoder.
    """
    parameters = dict(decoder.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
    for layer, w in zip(decoder.layers, packed.layers, strict=True):
        if w.qk_norm is not None:
            # Only these gains are not views: the packed form repeats them for each head.
            w.qk_norm.copy_(layer.qk_norm(decoder.config))


def _view(linears: Iterable[nn.Linear], joined: PackedLinear) -> None:
    """Make the weights and biases of `linears` views of their rows in `joined`."""
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = joined.weight[start:end]
        if joined.bias is not None:
            linear.bias.data = joined.bias[start:end]
        start = end
