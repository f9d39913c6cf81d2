"""All layers of a forward pass by one compiled kernel: fp32 on a CPU, without gradients.

What `decoder.layer_forward` computes layer by layer, to the bit, without the calls in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels import layers as kernels
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import KeyPlaces
from slipstream.models.functional import rope_table
from slipstream.models.linear import PackedLinear

if TYPE_CHECKING:
    from slipstream.models.decoder import PackedLayer


class CpuLayers:
    """Some layers, and the norm after them if there is one."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        config: ModelConfig,
        eps: Tensor,
        final_norm: Tensor | None,
    ) -> None:
        # Held: the table is of addresses.
        self._layers, self._final_norm, self._eps = list(layers), final_norm, eps
        self._config = config
        self._table = torch.tensor([_addresses(layer) for layer in layers])
        self._weights = sum(w.weight.numel() for layer in layers for w in _products(layer))

    def __call__(self, x_MD: Tensor, positions_BT: Tensor, places: KeyPlaces | None) -> Tensor:
        """Rows (M, D), which are written over, through all layers and the norm. Without `places`
        the sequences stand alone."""
        c = self._config
        M, D = x_MD.shape
        Q, H, K, W = c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        positions = positions_BT.reshape(-1).contiguous()
        if places is None:
            B, T = positions_BT.shape
            kv = x_MD.new_empty(2, B, H, T, K)
            places = KeyPlaces.alone(kv, B, T)
        widths = (D, D, D, (Q + 2 * H) * K, Q * K, Q * K, 2 * W, W)
        normed = x_MD.new_empty(M, D)
        # One piece of memory: spare, delta, qkv, q, mixed, gates, gated.
        room = x_MD.new_empty(M * (sum(widths) - D))
        starts = [room.data_ptr()]
        for width in (D, D, *widths[3:-1]):
            starts.append(starts[-1] + 4 * M * width)
        spare, delta, *others = starts
        cos, sin = rope_table(c, x_MD.dtype, x_MD.device)
        kernels.layers(
            self._table.data_ptr(),
            len(self._layers),
            0 if self._final_norm is None else self._final_norm.data_ptr(),
            self._eps.data_ptr(),
            x_MD.data_ptr(),
            spare,
            delta,
            normed.data_ptr(),
            *others,
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            places.own_M.data_ptr(),
            places.first_M.data_ptr(),
            places.seen_M.data_ptr(),
            places.head_stride,
            places.longest,
            places.keys,
            places.values,
            places.layer_step,
            M,
            D,
            Q,
            H,
            K,
            W,
            work=self._weights,
        )
        return normed


def _products(layer: PackedLayer) -> tuple[PackedLinear, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _addresses(layer: PackedLayer) -> list[int]:
    qkv, out, gate_up, down = (_both(product.panels, product.start) for product in _products(layer))
    return [
        0 if layer.input_norm is None else layer.input_norm.data_ptr(),
        *qkv,
        0 if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        *out,
        layer.post_norm.data_ptr(),
        *gate_up,
        down[0],
    ]


def _both(panels: Tensor | None, start: Tensor | None) -> tuple[int, int]:
    assert panels is not None
    assert start is not None
    return panels.data_ptr(), start.data_ptr()
