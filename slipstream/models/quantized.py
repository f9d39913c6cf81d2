"""A quantized copy of a policy, which drafts on the policy's own KV cache.

The copy has the policy's embedding, norms and biases; its matrices are quantized
(`quantized_linear`). It reads the policy's keys and values of the context, so it needs no prefill.
The keys and values of its own tokens go to the slots in which the policy stores those of the tokens
that it verifies. There the policy overwrites them before it reads them.

Shapes: N requests, D hidden width, V vocabulary, L layers, H key-value heads, S slots, K head
width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.tile_quantized import GROUP
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import KeyPlaces
from slipstream.models.cpu_layers import CpuLayers, supports_layers
from slipstream.models.decoder import PackedDecoder, PackedLayer
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype, has_kernels
from slipstream.models.quantized_linear import Bits, QuantizedLinear, quantized_bytes

LARGEST_WEIGHT = 4096.0
"""Largest absolute value of a weight up to which the copy drafts. It keeps keys and values finite,
for hidden sizes up to 8192 and MLP widths up to 32768."""


def why_not_quantized(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why there can be no quantized copy of a policy; None if there can be one."""
    if not has_kernels(activation_dtype(dtype, device), device):
        return f"quantized copies need the compiled CPU kernels, which do not run on {device.type}"
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
    }
    wrong = [f"{name}={width}" for name, width in widths.items() if width % GROUP]
    if wrong or not supports_layers(config, dtype):
        if not wrong:
            return f"the compiled kernels do not support head_dim={config.head_dim} in {dtype}"
        return (
            f"the widths of a quantized copy must be multiples of {GROUP}, but {', '.join(wrong)}"
        )
    return None


def quantized_policy_bytes(config: ModelConfig, bits: int, lm_head_bits: int) -> int:
    """Return the bytes of the quantized matrices of a policy."""
    D, W, inner = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    joined = inner + 2 * config.num_kv_heads * config.head_dim
    layer = sum(
        quantized_bytes(outputs, inputs, bits)
        for outputs, inputs in ((joined, D), (D, inner), (2 * W, D), (D, W))
    )
    return config.num_layers * layer + quantized_bytes(config.vocab_size, D, lm_head_bits)


class QuantizedPolicy:
    """The quantized matrices of a policy, renewed from its current weights on demand.

    Only for policies for which `why_not_quantized` returns None.
    """

    def __init__(self, bits: Bits, lm_head_bits: Bits) -> None:
        self._bits, self._lm_head_bits = bits, lm_head_bits
        self._memory: list[Tensor] = []
        self._policy: PackedDecoder | None = None
        self._layers: CpuLayers | None = None
        self._lm_head: QuantizedLinear | None = None
        self._is_usable = True

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized matrices."""
        return sum(memory.nbytes for memory in self._memory)

    def forget(self) -> None:
        """Note that the policy's weights have changed, and hold them no longer."""
        self._policy = self._layers = self._lm_head = None

    @property
    def is_usable(self) -> bool:
        """Whether no weight exceeds `LARGEST_WEIGHT`.

        With larger ones, keys and values could be infinite or NaN. They would change the policy's
        tokens, because attention multiplies slots that a row does not see by zero.
        """
        return self._is_usable

    def renew(self, policy: PackedDecoder) -> bool:
        """Quantize `policy` unless this is its current copy. Return whether it was necessary.

        Earlier memory is used again.
        """
        if policy is self._policy:
            return False
        self._is_usable = all(map(_is_small, _weights(policy)))
        memory = iter(self._memory)
        made: list[Tensor] = []

        def quantized(linear: PackedLinear, bits: Bits) -> QuantizedLinear:
            found = QuantizedLinear.of(linear, bits, next(memory, None))
            made.append(found.panels)
            return found

        layers = [
            [quantized(product, self._bits) for product in _products(layer)]
            for layer in policy.layers
        ]
        self._lm_head = quantized(policy.lm_head, self._lm_head_bits)
        self._layers = CpuLayers(
            policy.layers, policy.config, policy.eps, policy.norm, quantized=layers
        )
        self._memory, self._policy = made, policy
        return True

    def logits(self, ids_N: Tensor, positions_N: Tensor, places: KeyPlaces) -> Tensor:
        """Return logits (N, padded vocabulary) of the tokens after `ids`, at `positions`.

        Stores the keys and values of `ids` at `places`. Raises RuntimeError before `renew`.
        """
        if self._policy is None or self._layers is None or self._lm_head is None:
            raise RuntimeError("the quantized copy was not made from the policy's weights yet")
        x = F.embedding(ids_N, self._policy.embedding)
        hidden, _ = self._layers(x, positions_N[:, None], places)
        return self._lm_head.product(hidden)


def _products(layer: PackedLayer) -> tuple[PackedLinear, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _weights(policy: PackedDecoder) -> Iterator[Tensor]:
    """Yield all weights of a policy."""
    yield policy.embedding
    yield policy.norm
    for layer in policy.layers:
        for given in (layer.input_norm, layer.qk_norm, layer.post_norm):
            if given is not None:
                yield given
        for product in _products(layer):
            yield product.weight
            if product.bias is not None:
                yield product.bias


def _is_small(weight: Tensor) -> bool:
    """Return whether all numbers are finite and at most `LARGEST_WEIGHT` in size."""
    least, most = torch.aminmax(weight)
    # A comparison with NaN is false.
    return bool(least >= -LARGEST_WEIGHT) and bool(most <= LARGEST_WEIGHT)
