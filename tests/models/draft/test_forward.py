"""The drafting pass of a head agrees with its training pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.forward import DraftPass
from slipstream.models.rope_scaling import RopeScaling, YarnScaling
from tests.inference.helpers import make_decoder


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("qwen3", None),
        ("qwen2", None),
        ("llama", None),
        ("mistral", YarnScaling(factor=4.0, original_max_position_embeddings=8)),
    ],
)
@pytest.mark.parametrize("kernels", [True, False])
def test_drafting_column_by_column_equals_the_training_pass(
    family: str, scaling: RopeScaling | None, kernels: bool
) -> None:
    decoder = make_decoder(family=family, rope_scaling=scaling)
    config = decoder.config
    head = DraftHead(config)
    head.init_weights(1)
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 7, 12]
    ids = torch.randint(0, config.vocab_size, (3, 12), generator=generator)
    features = torch.randn(3, 12, config.hidden_size, generator=generator)
    with torch.no_grad():
        packed, embedding = head.pack(torch.float32), decoder.pack(torch.float32).embedding
        assert packed.fused is not None
        if not kernels:
            packed = replace(packed, fused=None)
        expected = next(packed.unroll(ids, features, embedding, 1))
        kv = torch.full((2, 4, config.num_kv_heads, 64, config.head_dim), 7.0)
        # Slots beyond a row's start are overwritten before any query sees them.
        starts = [length - 6 for length in lengths]
        cache = KeyBlocks.contiguous(kv[None]) if kernels else kv
        before = DraftPass(packed, embedding, cache, torch.arange(6).expand(3, -1), 6)
        before.run(0, ids[:, :6], features[:, :6])
        slots = torch.tensor([list(range(start, start + 6)) for start in starts])
        run = DraftPass(packed, embedding, cache, slots, int(slots.max()) + 1)
        selected = torch.arange(3)[:, None], slots
        own_ids, own_features = ids[selected], features[selected]
        got = [run.run(0, own_ids[:, :4], own_features[:, :4])]
        got += [run.run(c, own_ids[:, c : c + 1], own_features[:, c : c + 1]) for c in (4, 5)]
    torch.testing.assert_close(torch.cat(got, 1), expected[selected], rtol=1e-5, atol=1e-5)
