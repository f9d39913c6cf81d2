"""Run all layers of a forward pass in one call of a compiled CPU kernel, without gradients.

The results equal those of `decoder.layer_forward` bit for bit. One call saves the overhead of many
small ones.

Shapes: M rows (tokens), D hidden width, E input width of the first layer's projections.
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
from slipstream.models.cpu_attention import KeyPlaces, OwnKeys, supports_attention
from slipstream.models.functional import rope_table
from slipstream.models.linear import PackedLinear, present
from slipstream.models.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from slipstream.models.decoder import PackedLayer


def supports_layers(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Return whether `CpuLayers` supports these layers: their products must fill whole panels."""
    heads = config.num_heads + 2 * config.num_kv_heads
    widths = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        heads * config.head_dim,
        2 * config.intermediate_size,
    )
    return all(width % PANEL == 0 for width in widths) and supports_attention(config, dtype)


class CpuLayers:
    """A stack of layers, and the norm after them if there is one.

    Only for configurations for which `supports_layers` returns True.
    """

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        config: ModelConfig,
        eps: Tensor,
        final_norm: Tensor | None,
        *,
        quantized: Sequence[Sequence[QuantizedLinear]] | None = None,
    ) -> None:
        """All weights must have the same dtype, which is the compute dtype.

        `quantized` replaces the products qkv, out, gate_up and down of each layer. All must have
        the same number of bits.
        """
        # Kept alive, because the table holds only addresses.
        self._layers, self._final_norm, self._eps = list(layers), final_norm, eps
        self._config, self._quantized = config, quantized
        self._bits = 0 if quantized is None else quantized[0][0].bits
        used: Sequence[Sequence[PackedLinear | QuantizedLinear]] = (
            [_products(layer) for layer in layers] if quantized is None else quantized
        )
        self._table = torch.tensor(
            [_addresses(layer, products) for layer, products in zip(layers, used, strict=True)]
        )
        self.dtype = layers[0].qkv.weight.dtype
        self._aux_columns: dict[tuple[int, ...], Tensor] = {}
        self._weights = sum(w.weight.numel() for layer in layers for w in _products(layer))

    @property
    def table(self) -> int:
        """Address of the table of weight addresses that `kernels.layers` reads."""
        return self._table.data_ptr()

    @property
    def size(self) -> int:
        """Number of weights in all layers."""
        return self._weights

    def buffers(self, like: Tensor, rows: int) -> tuple[Tensor, list[int]]:
        """Allocate the kernel's buffers for `rows` rows. Return the memory and the addresses.

        The buffers are spare, delta, qkv, q, mixed, gates, gated and own_rows. The caller must keep
        the memory alive during the call.
        """
        c = self._config
        D, W, inner = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        widths = (D, D, inner + 2 * c.num_kv_heads * c.head_dim, inner, inner, 2 * W, W)
        # A bf16 product may read rows past the end of `gated`.
        sizes = [rows * width for width in widths]
        sizes[-1] += ROWS_BEYOND // 2 * W
        others = torch.get_num_threads() - 1
        memory = like.new_empty(sum(sizes) + others * kernels.own_numbers(rows, D))
        addresses, start = [], memory.data_ptr()
        for size in [*sizes, 0]:
            addresses.append(start)
            start += 4 * size
        return memory, addresses

    def __call__(
        self,
        x_MD: Tensor,
        positions_BT: Tensor,
        places: KeyPlaces | None,
        lengths: Sequence[int] | None = None,
        *,
        aux_layers: Sequence[int] = (),
        qkv_input_ME: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows (M, D) through all layers and the norm.

        Returns the result (M, D), and the inputs of the n `aux_layers` concatenated (M, n * D), or
        None without `aux_layers`. The call overwrites `x_MD`. Without `places` each sequence
        attends to itself, as in `CpuAttention`. If `qkv_input_ME` is set, it replaces the normed
        input of the first layer's q, k and v projections.
        """
        c = self._config
        M, D = x_MD.shape
        Q, H, K, W = c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        positions = positions_BT.reshape(-1).contiguous()
        if places is None:
            B, T = positions_BT.shape
            own = OwnKeys([T] * B if lengths is None else lengths, self.dtype)
            places = KeyPlaces.without_cache(own.buffer(c), own)
        normed = x_MD.new_empty(M, D)
        aux_inputs = x_MD.new_empty(M, len(aux_layers) * D) if aux_layers else None
        columns = self._columns(tuple(aux_layers)) if aux_layers else None
        memory, (spare, delta, *others, own_rows) = self.buffers(x_MD, M)
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
            *places.arguments,
            places.blocks.keys,
            places.blocks.values,
            places.blocks.layer_step,
            0 if aux_inputs is None else aux_inputs.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            len(aux_layers),
            0 if qkv_input_ME is None else qkv_input_ME.data_ptr(),
            0 if qkv_input_ME is None else qkv_input_ME.shape[1],
            own_rows,
            M,
            D,
            Q,
            H,
            K,
            W,
            self.dtype.itemsize,
            self._bits,
            work=self._weights,
        )
        del memory  # The kernel used it until here.
        return normed, aux_inputs

    def _columns(self, aux_layers: tuple[int, ...]) -> Tensor:
        """Return for each layer its index in `aux_layers`, or -1."""
        if aux_layers not in self._aux_columns:
            places = [
                aux_layers.index(i) if i in aux_layers else -1 for i in range(len(self._layers))
            ]
            self._aux_columns[aux_layers] = torch.tensor(places)
        return self._aux_columns[aux_layers]


def _products(layer: PackedLayer) -> tuple[PackedLinear, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _addresses(layer: PackedLayer, products: Sequence[PackedLinear | QuantizedLinear]) -> list[int]:
    """Return the addresses of a layer's weights in the order of `kernels.layers.WEIGHTS`."""
    qkv, out, gate_up, down = (
        (present(product.panels).data_ptr(), present(product.start).data_ptr())
        for product in products
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
