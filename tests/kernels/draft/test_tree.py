"""Draft trees from one call, compared with a separate pass along each path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config.schema_speculative import MOST_BRANCHES
from slipstream.kernels.draft.tree import WIDTH
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.forward import DraftPass, TreeDrafter
from slipstream.sampling.noise import gumbel_noise
from tests.inference.helpers import make_decoder


@pytest.mark.parametrize(("steps", "topk"), [(1, 3), (4, 2), (3, 5), (5, 1)])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.no_grad()
def test_candidates_match_a_separate_pass_along_each_path(
    steps: int, topk: int, sequences: int, temperature: float
) -> None:
    decoder = make_decoder()
    config = decoder.config
    head = DraftHead(config)
    head.init_weights(1)
    packed, policy = head.pack(torch.float32), decoder.pack(torch.float32)
    generator = torch.Generator().manual_seed(steps)
    counts = np.array([3, 1, 6][:sequences])
    total = int(counts.sum())
    ids = torch.randint(0, config.vocab_size, (total,), generator=generator)
    features = torch.randn(total, config.hidden_size, generator=generator)
    kv = torch.zeros(2, sequences, config.num_kv_heads, 64, config.head_dim)
    keys = torch.randint(-(1 << 31), 1 << 31, (sequences, 2), generator=generator).int()
    positions = torch.arange(sequences) * 5 + 9
    heat = torch.full((sequences,), temperature)
    addresses = np.array([row.data_ptr() for row in features])
    blocks = KeyBlocks.contiguous(kv[None])
    found = TreeDrafter(packed, policy)(
        blocks, np.zeros(sequences, np.int64), counts, ids.numpy(), addresses, keys,
        positions, heat, steps, topk,
    )  # fmt: skip
    start = 0
    for n, count in enumerate(counts.tolist()):
        part = slice(start, start + count)
        start += count

        def logits(path: list[int]) -> torch.Tensor:
            room = torch.zeros(2, 1, config.num_kv_heads, 64, config.head_dim)
            cache = KeyBlocks.contiguous(room[None])
            run = DraftPass(packed, policy.embedding, cache, torch.arange(60)[None], 60)
            hidden = run.run(0, ids[None, part], features[None, part])[:, -1:]  # noqa: B023
            for i, token in enumerate(path):
                hidden = run.run(count + i, torch.tensor([[token]]), hidden)  # noqa: B023
            return policy.lm_head(hidden[0])[0].float()

        def candidates(path: list[int]) -> tuple[list[int], torch.Tensor]:
            scores = logits(path).double()
            if temperature:
                noise = gumbel_noise(keys[n, None], positions[n, None] + len(path), len(scores))  # noqa: B023
                scores = scores / temperature + noise[0]
            best, order = scores.topk(WIDTH)
            return order[:topk].tolist(), torch.log_softmax(best, 0)[:topk]

        tokens, parents, scores = found[0][n].tolist(), found[1][n].tolist(), found[2][n]
        level = [-1]
        first = 0
        for depth in range(steps):
            size = topk * len(level)
            followed = sorted(parents[first : first + size : topk])
            assert followed == sorted(level)
            for i in range(first, first + size, topk):
                path, node = list[int](), parents[i]
                above = 0.0 if node < 0 else scores[node]
                while node >= 0:
                    path.insert(0, tokens[node])
                    node = parents[node]
                assert len(path) == depth
                expected, log_probs = candidates(path)
                assert tokens[i : i + topk] == expected
                torch.testing.assert_close(
                    torch.from_numpy(scores[i : i + topk]), above + log_probs, rtol=1e-4, atol=1e-4
                )
            order = np.argsort(-scores[first : first + size], kind="stable")
            level = [first + int(i) for i in order[:topk]]
            first += size
        assert first == len(tokens)


def test_the_options_allow_the_maximum_branches_of_a_tree() -> None:
    assert MOST_BRANCHES == WIDTH
