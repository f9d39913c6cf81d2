"""Draft trees by one forward pass of the head per level. On CPUs `kernels.draft.tree` does the same
in one call; this module serves the other devices. Where that is a GPU they may be recorded
(`draft_graphs`): nothing here waits for it, but to see whether a level is worth going on from. What
a level takes there is the number of its operations, so what levels share is computed once.

Shapes: N sequences, F nodes of a level that are followed, k candidates of each, D hidden width,
V vocabulary, A tokens in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.inference.speculation.draft_graphs import DraftInputs
from slipstream.inference.speculation.protocol import DraftBatch
from slipstream.kernels.draft.tree import WIDTH
from slipstream.models.draft.forward import DraftPass, LevelPass, of_parents
from slipstream.models.draft.model import PackedDraft
from slipstream.sampling.choose import choose
from slipstream.sampling.noise import AT_ONCE, gumbel_noise
from slipstream.tree_size import candidate_count


def chain_by_columns(
    head: PackedDraft, kv: Tensor, batch: DraftBatch, given: DraftInputs, num_keys: int, steps: int
) -> Tensor:
    """Chains (N, `steps`) into `kv`, whose first `num_keys` slots have room for them."""
    hidden_ND, lm_head = given.hidden_ND, batch.policy.lm_head
    laws = None if batch.rows.any_truncated else _Laws(batch, steps, lm_head.weight.shape[0])

    def draft(step: int) -> Tensor:
        logits_NV = head.logits(hidden_ND, lm_head)
        if laws is None:
            return choose(logits_NV, batch.positions_N + step, batch.rows).tokens
        # Over the temperature, logits and log q differ by a constant, so no distribution is needed.
        return laws.scores(logits_NV[:, None], step)[:, 0].argmax(-1)

    drafts = [draft(0)]
    if steps == 1:
        return drafts[0][:, None]
    slots_NC = given.ends_N[:, None] + torch.arange(steps - 1, device=kv.device)
    run = DraftPass(head, batch.policy.embedding, kv, slots_NC, num_keys)
    for step in range(1, steps):
        hidden_ND = run.run(step - 1, drafts[-1][:, None], hidden_ND[:, None])[:, 0]
        drafts.append(draft(step))
    return torch.stack(drafts, 1)


def draft_tree_batched(
    head: PackedDraft,
    kv: Tensor,
    batch: DraftBatch,
    given: DraftInputs,
    num_keys: int,
    steps: int,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of `Candidates`, drafted into `kv`, whose first `num_keys` slots have room for
    them. Levels end where no score is as good as `batch.min_log_probability`."""
    N, lm_head, device = len(given.ends_N), batch.policy.lm_head, kv.device
    laws = _Laws(batch, steps, lm_head.weight.shape[0])
    run = LevelPass(
        head, batch.policy.embedding, kv, given.ends_N, num_keys, max(steps - 1, 1), topk
    )
    hidden_NFD = given.hidden_ND[:, None]
    scores_NF = torch.zeros(N, 1, device=device)
    found: list[tuple[Tensor, Tensor]] = []
    # Of each level those that are followed, by their places in it.
    followed: list[Tensor] = []
    for level in range(steps):
        F = hidden_NFD.shape[1]
        logits_MV = head.logits(hidden_NFD.flatten(0, 1), lm_head)
        scores_NFV = laws.scores(logits_MV.view(N, F, -1), level)
        best_NFW, likely_NFW = scores_NFV.topk(min(WIDTH, scores_NFV.shape[-1]))
        if not level:
            gaps_NW = (best_NFW - best_NFW[..., :1])[:, 0]
        promised_NFk = torch.log_softmax(best_NFW / given.scale, -1)[..., :topk]
        tokens_NC = likely_NFW[..., :topk].flatten(1)
        scores_NC = (scores_NF[..., None] + promised_NFk).flatten(1)
        found.append((tokens_NC, scores_NC))
        if level + 1 == steps or (
            batch.min_acceptance > 0 and float(scores_NC.max()) < batch.min_log_probability
        ):
            break
        scores_NF, best_NF = scores_NC.topk(topk)
        followed.append(best_NF)
        parents_NF = best_NF // topk
        ids_NF = tokens_NC.gather(1, best_NF)
        hidden_NFD = run.run(level, ids_NF, of_parents(hidden_NFD, parents_NF), parents_NF)
    tokens, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return tokens, _parents(followed, N, topk, device), scores, gaps_NW


def _parents(followed: list[Tensor], N: int, topk: int, device: torch.device) -> Tensor:
    """Numbers (N, C) of the candidates' parents, level by level; -1 for those of the first."""
    root_N1 = torch.full((N, 1), -1, device=device)
    if not followed:
        return root_N1.expand(-1, topk)
    # `candidate_count` of 0, 1, ... levels, in two operations: all levels but the first have the
    # same width, so only the start of the first has to be raised to 0.
    wide = topk * topk
    end = candidate_count(len(followed), topk)
    begins = torch.arange(topk - wide, end, wide, device=device)
    numbers_NLF = torch.stack(followed, 1) + begins.clamp(min=0)[:, None]
    return torch.cat([root_N1, numbers_NLF.flatten(1)], 1).repeat_interleave(topk, 1)


class _Laws:
    """log q + G but for a constant, for the tokens in a row that a draft is of: G is the noise of
    the position that a token is for, so that the policy, which adds it, too, chooses the same."""

    def __init__(self, batch: DraftBatch, steps: int, vocab_size: int) -> None:
        rows = self._rows = batch.rows
        self._positions_N, self._vocab_size = batch.positions_N, vocab_size
        greedy_N11 = (rows.temperature_N == 0)[:, None, None] if rows.any_greedy else None
        self._greedy_N11 = greedy_N11
        self._heat_N11 = None
        if rows.any_tempered:
            heat_N11 = rows.temperature_N[:, None, None]
            self._heat_N11 = heat_N11 if greedy_N11 is None else heat_N11.masked_fill(greedy_N11, 1)
        self._noise_NAV = None
        count = len(batch.positions_N) * steps
        if rows.any_sampled and count * vocab_size <= AT_ONCE:
            self._noise_NAV = self._noise(0, steps)

    def scores(self, logits_NFV: Tensor, step: int) -> Tensor:
        """Of logits (N, F, V), for the tokens `step` after the first, in fp32: of two tokens that
        are equally good there either may be drafted, for the policy decides."""
        scores_NFV = logits_NFV
        if self._heat_N11 is not None:
            scores_NFV = scores_NFV / self._heat_N11
        if not self._rows.any_sampled:
            return scores_NFV
        if self._noise_NAV is not None:
            return scores_NFV + self._noise_NAV[:, step : step + 1]
        return scores_NFV + self._noise(step, 1)

    def _noise(self, start: int, count: int) -> Tensor:
        rows, device = self._rows, self._positions_N.device
        after_A = torch.arange(start, start + count, device=device)
        positions_NA = self._positions_N[:, None] + after_A
        keys = rows.keys_N2.repeat_interleave(count, 0)
        noise = gumbel_noise(keys, positions_NA.flatten(), self._vocab_size).float()
        noise_NAV = noise.view(len(rows.keys_N2), count, -1)
        return noise_NAV if self._greedy_N11 is None else noise_NAV.masked_fill(self._greedy_N11, 0)
