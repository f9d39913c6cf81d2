"""Draft trees level by level, a pass for each: what `kernels.tree` does in one call, for heads and
devices that it is not for.

Shapes: N sequences, F nodes of a level that are followed, k candidates of each, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.kernels.tree import WIDTH
from slipstream.models.draft_model import PackedDraft
from slipstream.models.draft_pass import DraftPass
from slipstream.sampling.noise import gumbel_noise
from slipstream.sampling.tree import Candidates


def tree_by_levels(
    head: PackedDraft,
    kv: Tensor,
    batch: DraftBatch,
    ends_N: Tensor,
    hidden_ND: Tensor,
    steps: int,
    topk: int,
    scale: float = 1.0,
) -> Candidates:
    """From the states `hidden_ND` that the head predicts after the first `ends_N` slots of `kv`:
    drafts go to the slots after those. Levels end where no score is as good as `batch.least`."""
    N, device = len(ends_N), kv.device
    num_keys = int(ends_N.max()) + (steps - 1) * topk
    paths_NFP = torch.zeros(N, 1, 1 + steps, dtype=torch.int64, device=device)
    paths_NFP[..., 0] = ends_N[:, None]
    hidden_NFD = hidden_ND[:, None]
    scores_NF = torch.zeros(N, 1, dtype=torch.float64, device=device)
    numbers_NF = torch.full((N, 1), -1, device=device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    for level in range(steps):
        F = hidden_NFD.shape[1]
        tokens_NC, promised_NFk, best_NFW = _promising(batch, head, hidden_NFD, level, topk, scale)
        if not level:
            gaps_NW = (best_NFW - best_NFW[..., :1])[:, 0]
        scores_NC = (scores_NF[..., None] + promised_NFk).flatten(1)
        found.append((tokens_NC, numbers_NF.repeat_interleave(topk, 1), scores_NC))
        if level + 1 == steps or float(scores_NC.max()) < batch.least:
            break
        best_NF = scores_NC.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        parent_NF = best_NF // topk
        slots_NF = ends_N[:, None] + level * topk + torch.arange(topk, device=device)

        def of_parents(x_NFX: Tensor) -> Tensor:
            index = parent_NF[..., None].expand(-1, -1, x_NFX.shape[-1])  # noqa: B023
            return x_NFX.gather(1, index)

        paths_NFP = of_parents(paths_NFP)
        paths_NFP[..., 1 + level] = slots_NF
        run = DraftPass(
            head,
            batch.policy.embedding,
            kv,
            slots_NF,
            num_keys,
            positions_NC=(ends_N + level)[:, None].expand_as(slots_NF),
            paths_NCP=paths_NFP,
        )
        hidden_NFD = run.run(0, tokens_NC.gather(1, best_NF), of_parents(hidden_NFD))
        scores_NF, numbers_NF = scores_NC.gather(1, best_NF), count + best_NF
        count += F * topk
    tokens, parents, scores = (
        torch.cat(parts, 1).cpu().numpy() for parts in zip(*found, strict=True)
    )
    return Candidates(tokens, parents, scores, gaps_NW.cpu().numpy())


def _promising(
    batch: DraftBatch, head: PackedDraft, hidden_NFD: Tensor, level: int, topk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, F * k), the logarithms of what they promise (N, F, k), and the best scores
    (N, F, W); see `kernels.tree`."""
    N, F = hidden_NFD.shape[:2]
    rows = batch.rows.repeated(F)
    scores_MV = head.logits(hidden_NFD.flatten(0, 1), batch.policy.lm_head).double()
    greedy_M1 = (rows.temperature_N == 0)[:, None]
    scores_MV = scores_MV / torch.where(greedy_M1, 1.0, rows.temperature_N[:, None])
    if rows.any_sampled:
        positions = (batch.positions_N + level).repeat_interleave(F)
        noise = gumbel_noise(rows.keys_N2, positions, scores_MV.shape[1])
        scores_MV = scores_MV + noise.masked_fill(greedy_M1, 0.0)
    best, tokens = scores_MV.topk(min(WIDTH, scores_MV.shape[1]))
    promised = torch.log_softmax(best / scale, -1)[:, :topk]
    tokens_NC = tokens[:, :topk].reshape(N, -1)
    return tokens_NC, promised.reshape(N, F, topk), best.view(N, F, -1)
