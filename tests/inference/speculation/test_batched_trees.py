"""Batched tree drafting gives the same trees as the CPU kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.inference.speculation.batched_trees import draft_tree_batched
from slipstream.inference.speculation.draft_graphs import DraftInputs
from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.models.config import ModelConfig
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.forward import DraftPass, TreeDrafter
from slipstream.models.draft.model import DraftModel
from slipstream.sampling.choose import SamplingRows
from slipstream.sampling.tree import Candidates
from tests.inference.helpers import make_decoder


def make_head(kind: str, config: ModelConfig) -> DraftModel:
    few = range(1, config.vocab_size, 3) if "some tokens" in kind else None
    if "eagle3" not in kind:
        return DraftHead(config, few)
    return Eagle3Head(config, (0, 1, 2), few)


def candidates(parts: tuple[torch.Tensor, ...]) -> Candidates:
    return Candidates(*(part.numpy() for part in parts))


@pytest.mark.parametrize("kind", ["eagle", "eagle, some tokens", "eagle3", "eagle3, some tokens"])
@pytest.mark.parametrize("sharp", [1, 3])
@pytest.mark.parametrize(("steps", "topk"), [(1, 3), (4, 2), (3, 5)])
@torch.no_grad()
def test_batched_trees_equal_those_of_the_cpu_kernel(
    steps: int, topk: int, sharp: int, kind: str
) -> None:
    decoder = make_decoder(num_layers=3)
    config = decoder.config
    head = make_head(kind, config)
    head.init_weights(1)
    torch.manual_seed(2)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            # Larger weights, so that errors of the attention mask change the results.
            parameter.mul_(sharp)
    packed, policy = head.pack(torch.float32), decoder.pack(torch.float32)
    generator = torch.Generator().manual_seed(steps)
    counts = np.array([4, 4, 4])
    ids = torch.randint(0, config.vocab_size, (3, 4), generator=generator)
    width = config.hidden_size * max(1, len(head.aux_layers))
    features = torch.randn(3, 4, width, generator=generator)
    rows = SamplingRows.of(
        [(1, 2), (3, 4), (5, 6)],
        temperatures=[1.0, 0.0, 0.6],
        top_ks=[0] * 3,
        top_ps=[1.0] * 3,
        min_ps=[0.0] * 3,
        device=torch.device("cpu"),
    )
    positions = torch.tensor([9, 12, 30])
    kv = torch.zeros(2, 3, config.num_kv_heads, 64, config.head_dim)
    addresses = np.array([row.data_ptr() for row in features.view(12, -1)])
    draft_tree = TreeDrafter(packed, policy)
    blocks = KeyBlocks.contiguous(kv[None])
    given = (
        blocks, np.zeros(3, np.int64), counts, ids.flatten().numpy(), addresses,
        rows.keys_N2, positions, rows.temperature_N,
    )  # fmt: skip
    expected = draft_tree(*given, steps, topk)
    batch = DraftBatch(
        request_ids=["a", "b", "c"], last=[0] * 3, positions_N=positions, rows=rows, policy=policy
    )
    plain, lm_head = replace(packed, fused=None), packed.draft_lm_head(policy.lm_head)
    room = torch.zeros_like(kv)
    run = DraftPass(plain, policy.embedding, room, torch.arange(4).expand(3, -1), 4)
    hidden = run.run(0, ids, plain.to_states(features))[:, -1]
    one = torch.tensor(1.0, dtype=torch.float64)
    shape = DraftInputs(torch.tensor([4, 4, 4]), hidden, one), 4 + steps * topk, steps, topk
    found = candidates(draft_tree_batched(plain, lm_head, room, batch, *shape))
    assert (found.tokens_NC == expected[0]).all()
    assert (found.parents_NC == expected[1]).all()
    np.testing.assert_allclose(found.scores_NC, expected[2], rtol=1e-3, atol=1e-3)
    # Drafting ends if no expanded node reaches the threshold. Candidates above it are not lost.
    threshold = 0.3
    fewer = draft_tree(*given, steps, topk, float(np.log(threshold)))
    level = candidates(
        draft_tree_batched(plain, lm_head, room, replace(batch, min_acceptance=threshold), *shape)
    )
    above = expected[2] >= np.log(threshold)
    assert ((fewer[2] >= np.log(threshold)) == above).all()
    assert (fewer[0][above] == expected[0][above]).all()
    # The kernel does not expand a node below the threshold, even if others are above it.
    behind = expected[1] >= 0
    dropped = behind & ~np.take_along_axis(above, np.maximum(expected[1], 0), 1)
    assert np.isneginf(fewer[2][dropped]).all()
    assert np.isfinite(fewer[2][~dropped & behind]).all()
    width = level.scores_NC.shape[1]
    assert not above[:, width:].any()
    assert ((level.scores_NC >= np.log(threshold)) == above[:, :width]).all()
    # With larger weights or fewer tokens, probabilities stay above the threshold, so drafting does
    # not end early.
    if steps == 4 and sharp == 1 and kind != "eagle, some tokens":
        assert np.isneginf(fewer[2]).any()
        assert width < expected[2].shape[1]
