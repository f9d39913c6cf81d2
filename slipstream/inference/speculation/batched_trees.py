"""Batched drafting with torch operations: one forward pass of the head per draft token of a chain,
or per level of a tree, for all requests.

Used on GPUs. On CPUs the kernel `kernels.draft.tree` drafts the same tokens in one call. Both
functions can be captured as CUDA graphs (`draft_graphs`): they do not synchronize with the GPU,
except to compare scores with `min_acceptance` if it is set. On a GPU the time of a level is the
number of its operations, so values that all levels share are computed once.

Trees follow EAGLE-2 (Li et al., https://arxiv.org/abs/2406.16858): each level expands its `topk`
best nodes, each with `topk` candidates.

Shapes: N requests, F expanded nodes of a level, k candidates of each node, W compared tokens of a
node, C candidates of a request, D hidden size, V vocabulary, A consecutive positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.inference.speculation.draft_graphs import DraftInputs
from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.kernels.draft.tree import WIDTH
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft.forward import DraftPass, LevelPass, of_parents
from slipstream.models.draft.model import PackedDraft
from slipstream.models.linear import PackedLinear
from slipstream.sampling.choose import choose
from slipstream.sampling.noise import AT_ONCE, gumbel_noise
from slipstream.tree_size import candidate_count


def draft_chain_batched(
    head: PackedDraft,
    lm_head: PackedLinear,
    kv: Tensor | KeyBlocks,
    batch: DraftBatch,
    inputs: DraftInputs,
    num_keys: int,
    steps: int,
) -> Tensor:
    """Draft chains (N, steps) with the result of `PackedDraft.draft_lm_head`.

    Keys and values of the drafts are written to `kv`, which needs `num_keys` slots.
    """
    hidden_ND, vocab_size = inputs.hidden_ND, head.config.vocab_size
    noisy = None if batch.rows.any_truncated else _NoisyScores(batch, steps, vocab_size)

    def draft(step: int) -> Tensor:
        logits_NV = head.logits(hidden_ND, lm_head)
        if noisy is None:
            return choose(logits_NV, batch.positions_N + step, batch.rows).tokens
        # Logits and log-probs differ by a constant, which does not change the argmax.
        return noisy.scores(logits_NV[:, None], step)[:, 0].argmax(-1)

    drafts = [draft(0)]
    if steps == 1:
        return drafts[0][:, None]
    slots_NC = inputs.ends_N[:, None] + torch.arange(steps - 1, device=inputs.ends_N.device)
    run = DraftPass(head, batch.policy.embedding, kv, slots_NC, num_keys)
    for step in range(1, steps):
        hidden_ND = run.run(step - 1, drafts[-1][:, None], hidden_ND[:, None])[:, 0]
        drafts.append(draft(step))
    return torch.stack(drafts, 1)


def draft_tree_batched(
    head: PackedDraft,
    lm_head: PackedLinear,
    kv: Tensor,
    batch: DraftBatch,
    inputs: DraftInputs,
    num_keys: int,
    steps: int,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft trees: tokens, parents and scores (N, C) and gaps (N, W), as in `Candidates`.

    Keys and values of the expanded nodes are written to `kv`, which needs `num_keys` slots.
    Drafting ends before `steps` levels if no score reaches `batch.min_log_probability`.
    """
    N, device = len(inputs.ends_N), kv.device
    noisy = _NoisyScores(batch, steps, head.config.vocab_size)
    run = LevelPass(
        head, batch.policy.embedding, kv, inputs.ends_N, num_keys, max(steps - 1, 1), topk
    )
    hidden_NFD = inputs.hidden_ND[:, None]
    scores_NF = torch.zeros(N, 1, device=device)
    found: list[tuple[Tensor, Tensor]] = []
    # Indices of the expanded nodes among the candidates of their level.
    expanded: list[Tensor] = []
    for level in range(steps):
        F = hidden_NFD.shape[1]
        logits_MV = head.logits(hidden_NFD.flatten(0, 1), lm_head)
        scores_NFV = noisy.scores(logits_MV.view(N, F, -1), level)
        best_NFW, ids_NFW = scores_NFV.topk(min(WIDTH, scores_NFV.shape[-1]))
        if not level:
            gaps_NW = (best_NFW - best_NFW[..., :1])[:, 0]
        log_acceptance_NFk = torch.log_softmax(best_NFW / inputs.scale, -1)[..., :topk]
        tokens_NC = ids_NFW[..., :topk].flatten(1)
        scores_NC = (scores_NF[..., None] + log_acceptance_NFk).flatten(1)
        found.append((tokens_NC, scores_NC))
        if level + 1 == steps or (
            batch.min_acceptance > 0 and float(scores_NC.max()) < batch.min_log_probability
        ):
            break
        scores_NF, best_NF = scores_NC.topk(topk)
        expanded.append(best_NF)
        parents_NF = best_NF // topk
        ids_NF = tokens_NC.gather(1, best_NF)
        hidden_NFD = run.run(level, ids_NF, of_parents(hidden_NFD, parents_NF), parents_NF)
    tokens, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return tokens, _parents(expanded, N, topk, device), scores, gaps_NW


def _parents(expanded: list[Tensor], N: int, topk: int, device: torch.device) -> Tensor:
    """Indices (N, C) of the candidates' parents among all candidates; -1 in the first level."""
    root_N1 = torch.full((N, 1), -1, device=device)
    if not expanded:
        return root_N1.expand(-1, topk)
    # Index of the first candidate of each level: `candidate_count` of 0, 1, ... levels. All levels
    # except the first have topk * topk candidates, so a range gives all starts except the first;
    # its first entry is negative or 0 and becomes 0.
    level_size = topk * topk
    end = candidate_count(len(expanded), topk)
    firsts = torch.arange(topk - level_size, end, level_size, device=device)
    indices_NLF = torch.stack(expanded, 1) + firsts.clamp(min=0)[:, None]
    return torch.cat([root_N1, indices_NLF.flatten(1)], 1).repeat_interleave(topk, 1)


class _NoisyScores:
    """Computes log-prob + Gumbel noise of tokens, up to a constant, for `steps` next positions.

    The policy adds the same noise when it samples at these positions. So if the log-probs of head
    and policy are close, the best draft is the token that the policy will sample.
    """

    def __init__(self, batch: DraftBatch, steps: int, vocab_size: int) -> None:
        """Computes the noise of all steps at once if it has at most `AT_ONCE` values."""
        rows = self._rows = batch.rows
        self._positions_N, self._vocab_size = batch.positions_N, vocab_size
        greedy_N11 = (rows.temperature_N == 0)[:, None, None] if rows.any_greedy else None
        self._greedy_N11 = greedy_N11
        self._temperature_N11 = None
        if rows.any_tempered:
            temperature_N11 = rows.temperature_N[:, None, None]
            if greedy_N11 is not None:
                temperature_N11 = temperature_N11.masked_fill(greedy_N11, 1)
            self._temperature_N11 = temperature_N11
        self._noise_NAV = None
        count = len(batch.positions_N) * steps
        if rows.any_sampled and count * vocab_size <= AT_ONCE:
            self._noise_NAV = self._noise(0, steps)

    def scores(self, logits_NFV: Tensor, step: int) -> Tensor:
        """Scores (N, F, V) of logits for the position `step` after the first draft's.

        fp32 is enough: if rounding makes two tokens equal, either may be drafted, because the
        policy decides which one is accepted.
        """
        scores_NFV = logits_NFV
        if self._temperature_N11 is not None:
            scores_NFV = scores_NFV / self._temperature_N11
        if not self._rows.any_sampled:
            return scores_NFV
        if self._noise_NAV is not None:
            return scores_NFV + self._noise_NAV[:, step : step + 1]
        return scores_NFV + self._noise(step, 1)

    def _noise(self, start: int, count: int) -> Tensor:
        """Gumbel noise (N, A, V) of `count` positions from `start` on; 0 for greedy requests."""
        rows, device = self._rows, self._positions_N.device
        offsets_A = torch.arange(start, start + count, device=device)
        positions_NA = self._positions_N[:, None] + offsets_A
        keys = rows.keys_N2.repeat_interleave(count, 0)
        noise = gumbel_noise(keys, positions_NA.flatten(), self._vocab_size).float()
        noise_NAV = noise.view(len(rows.keys_N2), count, -1)
        return noise_NAV if self._greedy_N11 is None else noise_NAV.masked_fill(self._greedy_N11, 0)
