"""Drafts by a pass of the head for each token of a chain, or level of a tree: what `kernels.tree`
does in one call, for devices that it is not for. Where that is a GPU they may be recorded
(`draft_graphs`): nothing here waits for it, but to see whether a level is worth going on from.

Shapes: N sequences, F nodes of a level that are followed, k candidates of each, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.inference.speculation.draft_graphs import DraftInputs
from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.kernels.tree import WIDTH
from slipstream.models.draft_model import PackedDraft
from slipstream.models.draft_pass import DraftPass
from slipstream.sampling.choose import choose, draw
from slipstream.sampling.noise import gumbel_noise


def chain_by_columns(
    head: PackedDraft, kv: Tensor, batch: DraftBatch, given: DraftInputs, num_keys: int, steps: int
) -> Tensor:
    """Chains (N, `steps`) into `kv`, whose first `num_keys` slots have room for them."""
    hidden_ND = given.hidden_ND
    drafts = [_choose(batch, head, hidden_ND, 0)]
    if steps == 1:
        return drafts[0][:, None]
    slots_NC = given.ends_N[:, None] + torch.arange(steps - 1, device=kv.device)
    run = DraftPass(head, batch.policy.embedding, kv, slots_NC, num_keys)
    for step in range(1, steps):
        hidden_ND = run.run(step - 1, drafts[-1][:, None], hidden_ND[:, None])[:, 0]
        drafts.append(_choose(batch, head, hidden_ND, step))
    return torch.stack(drafts, 1)


def _choose(batch: DraftBatch, head: PackedDraft, states_ND: Tensor, step: int) -> Tensor:
    """Drafted tokens (N,): argmax of log q + G, with the noise of the position that they are for.

    Over the temperature, logits and log q differ by a constant, so no distribution is needed.
    """
    rows, positions = batch.rows, batch.positions_N + step
    logits_NV = head.logits(states_ND, batch.policy.lm_head)
    if rows.cuts:
        return choose(logits_NV, positions, rows).tokens
    if rows.any_tempered:
        heat_N = torch.where(rows.temperature_N == 0, 1.0, rows.temperature_N)
        logits_NV = logits_NV / heat_N[:, None]
    return draw(logits_NV, positions, rows)


def tree_by_levels(
    head: PackedDraft,
    kv: Tensor,
    batch: DraftBatch,
    given: DraftInputs,
    num_keys: int,
    steps: int,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of `Candidates`, drafted into `kv`, whose first `num_keys` slots have room for
    them. Levels end where no score is as good as `batch.least`."""
    ends_N, device = given.ends_N, kv.device
    N = len(ends_N)
    paths_NFP = torch.zeros(N, 1, 1 + steps, dtype=torch.int64, device=device)
    paths_NFP[..., 0] = ends_N[:, None]
    hidden_NFD = given.hidden_ND[:, None]
    scores_NF = torch.zeros(N, 1, dtype=torch.float64, device=device)
    numbers_NF = torch.full((N, 1), -1, device=device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    for level in range(steps):
        F = hidden_NFD.shape[1]
        tokens_NC, promised_NFk, best_NFW = _promising(
            batch, head, hidden_NFD, level, topk, given.scale
        )
        if not level:
            gaps_NW = (best_NFW - best_NFW[..., :1])[:, 0]
        scores_NC = (scores_NF[..., None] + promised_NFk).flatten(1)
        found.append((tokens_NC, numbers_NF.repeat_interleave(topk, 1), scores_NC))
        if level + 1 == steps or (batch.worth > 0 and float(scores_NC.max()) < batch.least):
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
    tokens, parents, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return tokens, parents, scores, gaps_NW


def _promising(
    batch: DraftBatch, head: PackedDraft, hidden_NFD: Tensor, level: int, topk: int, scale: Tensor
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
