"""Copying new weights into the memory of old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.models.copy_in_place import copy_in_place
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from tests.inference.helpers import make_decoder


def tensors(packed: Any) -> list[torch.Tensor]:
    """Return all tensors that the forward pass uses."""
    layers = getattr(packed, "layers", None) or [packed.layer]
    linear = [packed.lm_head] if hasattr(packed, "lm_head") else [packed.fc]
    found = []
    for layer in layers:
        linear += [layer.qkv, layer.out, layer.gate_up, layer.down]
        found += [layer.post_norm, layer.input_norm, layer.qk_norm]
    found += [p.weight for p in linear]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["decoder", "eagle", "eagle3"])
@torch.no_grad()
def test_new_weights_keep_the_addresses_of_the_old_ones(kind: str, dtype: torch.dtype) -> None:
    def make(seed: int) -> Any:
        decoder = make_decoder(seed, num_layers=4)
        if kind == "decoder":
            return decoder.pack(dtype)
        made = (DraftHead(decoder.config) if kind == "eagle"
                else Eagle3Head(decoder.config, (1, 2, 3), None))  # fmt: skip
        made.init_weights(seed)
        return made.pack(dtype)

    old, new = make(1), make(2)
    places = [tensor.data_ptr() for tensor in tensors(old)]
    assert not all(map(torch.equal, tensors(old), tensors(new)))
    copy_in_place(old, new)
    assert [tensor.data_ptr() for tensor in tensors(old)] == places
    assert all(map(torch.equal, tensors(old), tensors(new)))
