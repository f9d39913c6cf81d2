"""The drafting pass of a head agrees with its training pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft import forward
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.forward import QUANTIZED_ROWS, DraftPass, TreeDrafter
from slipstream.models.quantized_linear import QuantizedLinear
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


def empty_cache(shape: tuple[int, ...]) -> KeyBlocks:
    return KeyBlocks.contiguous(torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("draft_tokens", [None, range(0, 4096, 2)])
@torch.no_grad()
def test_few_rows_draft_with_an_lm_head_of_8_bits(
    draft_tokens: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "has_vnni", lambda: True)
    monkeypatch.setattr(forward, "has_amx", lambda: False)
    decoder = make_decoder(vocab_size=4096)
    with torch.no_grad():
        # Four tokens in a row differ in one number only, and not at all in 8 bits.
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (1024, 32), generator=generator) * 2 - 1
        sizes = torch.full((4, 32), 0.75)
        sizes[:, 0], sizes[:, 5] = 1.0, torch.tensor([0.5, 0.5, 0.50390625, 0.50390625])
        decoder.lm_head_weight.copy_((signs[:, None] * sizes).view(4096, 32))
    config = decoder.config
    head = DraftHead(config, draft_tokens)
    head.init_weights(1)
    packed, policy = head.pack(torch.bfloat16), decoder.pack(torch.bfloat16)
    lm_head = packed.draft_lm_head(policy.lm_head)
    found, exact, rounded = [], [], []
    for sequences in (QUANTIZED_ROWS, QUANTIZED_ROWS + 1):
        features = torch.randn(
            sequences, config.hidden_size, generator=torch.Generator().manual_seed(sequences)
        )
        ids = torch.arange(sequences) * 7
        shape = 1, 2, sequences, config.num_kv_heads, 64, config.head_dim
        tokens = TreeDrafter(packed, policy)(
            empty_cache(shape),
            np.zeros(sequences, np.int64),
            np.ones(sequences, np.int64),
            ids.numpy(),
            np.array([row.data_ptr() for row in features]),
            torch.zeros(sequences, 2, dtype=torch.int32),
            torch.ones(sequences, dtype=torch.int64),
            torch.zeros(sequences),
            1,
            1,
        )[0]
        run = DraftPass(
            packed, policy.embedding, empty_cache(shape),
            torch.zeros(sequences, 1, dtype=torch.int64), 1,
        )  # fmt: skip
        states = run.run(0, ids[:, None], features[:, None])[:, 0]
        every = torch.arange(4096)[:: 1 if draft_tokens is None else 2]
        found.append(tokens[:, 0].tolist())
        exact.append(every[lm_head(states).argmax(-1)].tolist())
        rounded.append(every[QuantizedLinear.of(lm_head, 8).product(states).argmax(-1)].tolist())
    assert found == [rounded[0], exact[1]]
    assert rounded[0] != exact[0]
    assert rounded[1] != exact[1]
