"""Makes the memory for keys and values that fits the device and its kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.kv_rows import KVRows
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import supports_varlen


def make_store(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    budget_bytes: int,
    *,
    row_multiple: int = 1,
    before_growth: Callable[[int], None] | None = None,
) -> KVRows:
    """Return blocks where the compiled kernels compute, else a rectangle.

    A rectangle has rows in multiples of `row_multiple`. `before_growth` is called with the new size
    in bytes before the store grows, so that others can free parts of the budget.
    """
    if supports_varlen(config, dtype, device):
        return BlockStore(config, dtype, budget_bytes, before_growth=before_growth)
    return KVStore(
        config,
        dtype,
        device,
        budget_bytes,
        row_multiple=row_multiple,
        before_growth=before_growth,
    )
