"""All layers of a forward pass by one compiled kernel on a CPU, without gradients.

What `decoder.layer_forward` computes layer by layer, to the bit, without the calls in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels import layers as kernels
from slipstream.kernels.product_amx import ROWS_BEYOND
from slipstream.kernels.tile import PANEL
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import KeyPlaces, OwnKeys, attends
from slipstream.models.functional import rope_table
from slipstream.models.linear import PackedLinear, present

if TYPE_CHECKING:
    from slipstream.models.decoder import PackedLayer


def suits(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `CpuLayers` can compute such layers: their products fill whole panels."""
    heads = config.num_heads + 2 * config.num_kv_heads
    widths = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        heads * config.head_dim,
        2 * config.intermediate_size,
    )
    return all(width % PANEL == 0 for width in widths) and attends(config, dtype)


class CpuLayers:
    """Some layers, and the norm after them if there is one; for configurations that `suits`."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        config: ModelConfig,
        eps: Tensor,
        final_norm: Tensor | None,
    ) -> None:
        """All weights in the same dtype, which is computed in."""
        # Held: the table is of addresses.
        self._layers, self._final_norm, self._eps = list(layers), final_norm, eps
        self._config = config
        self._table = torch.tensor([_addresses(layer) for layer in layers])
        self.dtype = layers[0].qkv.weight.dtype
        self._tapped: dict[tuple[int, ...], Tensor] = {}
        self._weights = sum(w.weight.numel() for layer in layers for w in _products(layer))

    @property
    def table(self) -> int:
        """Address of the addresses of the weights, as `kernels.layers` takes them."""
        return self._table.data_ptr()

    @property
    def size(self) -> int:
        """How many weights there are."""
        return self._weights

    def room(self, like: Tensor, rows: int) -> tuple[Tensor, list[int]]:
        """Buffers for `rows` rows: spare, delta, qkv, q, mixed, gates, gated, own rows. Their
        memory, to be held, and their addresses."""
        c = self._config
        D, W, inner = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        widths = (D, D, inner + 2 * c.num_kv_heads * c.head_dim, inner, inner, 2 * W, W)
        # After the gates, what a product may read beyond its rows in bf16.
        sizes = [rows * width for width in widths]
        sizes[-1] += ROWS_BEYOND // 2 * W
        others = torch.get_num_threads() - 1
        memory = like.new_empty(sum(sizes) + others * kernels.own_numbers(rows, D))
        found, start = [], memory.data_ptr()
        for size in [*sizes, 0]:
            found.append(start)
            start += 4 * size
        return memory, found

    def __call__(
        self,
        x_MD: Tensor,
        positions_BT: Tensor,
        places: KeyPlaces | None,
        lengths: Sequence[int] | None = None,
        *,
        aux_layers: Sequence[int] = (),
        given_ME: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows (M, D), which are written over, through all layers and the norm; and, side by side
        (M, n * D), what went into the layers `aux_layers`, if there are any. Without `places` the
        sequences stand alone (`CpuAttention`). With `given_ME` the first layer's products take
        these rows instead of its input."""
        c = self._config
        M, D = x_MD.shape
        Q, H, K, W = c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        positions = positions_BT.reshape(-1).contiguous()
        if places is None:
            B, T = positions_BT.shape
            own = OwnKeys([T] * B if lengths is None else lengths, self.dtype)
            places = KeyPlaces.alone(own.room(c), own)
        normed = x_MD.new_empty(M, D)
        tapped = x_MD.new_empty(M, len(aux_layers) * D) if aux_layers else None
        columns = self._columns(tuple(aux_layers)) if aux_layers else None
        memory, (spare, delta, *others, own_rows) = self.room(x_MD, M)
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
            *places.path_arguments,
            places.head_stride,
            places.longest,
            places.keys,
            places.values,
            places.layer_step,
            0 if tapped is None else tapped.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            len(aux_layers),
            0 if given_ME is None else given_ME.data_ptr(),
            0 if given_ME is None else given_ME.shape[1],
            own_rows,
            M,
            D,
            Q,
            H,
            K,
            W,
            self.dtype.itemsize,
            work=self._weights,
        )
        del memory  # until here
        return normed, tapped

    def _columns(self, aux_layers: tuple[int, ...]) -> Tensor:
        """For each layer its place in `aux_layers`, or -1."""
        if aux_layers not in self._tapped:
            places = [
                aux_layers.index(i) if i in aux_layers else -1 for i in range(len(self._layers))
            ]
            self._tapped[aux_layers] = torch.tensor(places)
        return self._tapped[aux_layers]


def _products(layer: PackedLayer) -> tuple[PackedLinear, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _addresses(layer: PackedLayer) -> list[int]:
    qkv, out, gate_up, down = (
        (present(product.panels).data_ptr(), present(product.start).data_ptr())
        for product in _products(layer)
    )
    return [
        0 if layer.input_norm is None else layer.input_norm.data_ptr(),
        *qkv,
        0 if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        *out,
        layer.post_norm.data_ptr(),
        *gate_up,
        down[0],
    ]
