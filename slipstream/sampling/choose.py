"""The next token of each row: argmax of log p + G, an exact sample from p (Gumbel-max).

The rule that makes speculation lossless: the token is a function of the target's logits and of the
keyed noise alone (see `noise`), so whatever proposed it, the same token comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels import draw as kernel
from slipstream.sampling.noise import gumbel_noise
from slipstream.sampling.truncate import truncate


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row sampling settings as tensors of length N, built once per batch, not per step.

    `keys_N2` int32; `temperature_N` float32 with 0 for greedy; `top_k_N` int64; `top_p_N` and
    `min_p_N` float64, lest rounding a limit adds a token; `cuts` whether any row truncates: where
    none does, nobody reads these three.
    """

    keys_N2: Tensor
    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    any_sampled: bool
    any_greedy: bool
    any_tempered: bool
    cuts: bool

    @classmethod
    def of(
        cls,
        keys: Sequence[tuple[int, int]],
        *,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        device: torch.device,
    ) -> SamplingRows:
        """One row for each entry of the lists."""
        cuts = [k > 0 or p < 1 or m > 0 for k, p, m in zip(top_ks, top_ps, min_ps, strict=True)]
        return cls(
            keys_N2=torch.tensor(keys, dtype=torch.int32, device=device),
            temperature_N=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_k_N=torch.tensor(top_ks, device=device),
            top_p_N=torch.tensor(top_ps, dtype=torch.float64, device=device),
            min_p_N=torch.tensor(min_ps, dtype=torch.float64, device=device),
            any_sampled=any(t > 0 for t in temperatures),
            any_greedy=any(t == 0 for t in temperatures),
            any_tempered=any(t not in (0, 1) for t in temperatures),
            cuts=any(cuts),
        )

    @property
    def kinds(self) -> tuple[bool, bool, bool]:
        """Which operations choosing takes, where no row truncates."""
        return self.any_sampled, self.any_greedy, self.any_tempered

    def uncut(self, keys_N2: Tensor, temperature_N: Tensor) -> SamplingRows:
        """Rows of the same `kinds`, which none truncates, with other keys and temperatures."""
        unused = torch.zeros(len(keys_N2), dtype=torch.int64, device=keys_N2.device)
        return replace(
            self,
            keys_N2=keys_N2,
            temperature_N=temperature_N,
            top_k_N=unused,
            top_p_N=unused,
            min_p_N=unused,
            cuts=False,
        )

    def repeated(self, times: int) -> SamplingRows:
        """Each row `times` times, one after the other."""
        return replace(
            self,
            keys_N2=self.keys_N2.repeat_interleave(times, 0),
            temperature_N=self.temperature_N.repeat_interleave(times),
            top_k_N=self.top_k_N.repeat_interleave(times),
            top_p_N=self.top_p_N.repeat_interleave(times),
            min_p_N=self.min_p_N.repeat_interleave(times),
        )

    def part(self, rows: slice | Tensor) -> SamplingRows:
        """The settings of some of the rows: a slice, or indices (int64), which may repeat."""

        def of(settings: Tensor) -> Tensor:
            # By index_select rather than by brackets: half the time, in every step with trees.
            return settings[rows] if isinstance(rows, slice) else settings.index_select(0, rows)

        cuts = self.cuts
        return SamplingRows(
            keys_N2=of(self.keys_N2),
            temperature_N=of(self.temperature_N),
            top_k_N=of(self.top_k_N) if cuts else self.top_k_N,
            top_p_N=of(self.top_p_N) if cuts else self.top_p_N,
            min_p_N=of(self.min_p_N) if cuts else self.min_p_N,
            any_sampled=self.any_sampled,
            any_greedy=self.any_greedy,
            any_tempered=self.any_tempered,
            cuts=cuts,
        )


ELEMENTS_AT_ONCE = 1 << 18
"""On CPU, rows are taken in blocks of so many logits: larger temporaries are fresh memory each
time, which costs as much as what is computed in it."""

FEWEST_AT_ONCE = 4
"""And of so many rows at least, or as many as there are threads: they share a draw by rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens (N,) int64 with two log-probs (N,) float32.

    `log_probs`: full-vocabulary log-softmax at the sampling temperature, what a trainer recomputes
    (temperature 1 for greedy rows). `sampling_log_probs`: of the law the token was drawn from,
    after truncation; 0 for greedy rows, whose law is a point mass. A row with a NaN or infinite
    logit has the log-prob NaN, and its token means nothing.
    """

    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


def choose(logits_NV: Tensor, positions_N: Tensor, rows: SamplingRows) -> Choice:
    """Choose one token per row. `logits_NV` float32; `positions_N` int64 absolute positions."""
    count, vocab_size = logits_NV.shape
    at_once = max(FEWEST_AT_ONCE, torch.get_num_threads(), ELEMENTS_AT_ONCE // vocab_size)
    if count <= at_once or logits_NV.is_cuda:
        return _choose(logits_NV, positions_N, rows)
    parts = []
    for start in range(0, count, at_once):
        b = slice(start, start + at_once)
        parts.append(_choose(logits_NV[b], positions_N[b], rows.part(b)))
    return Choice(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.log_probs for part in parts]),
        torch.cat([part.sampling_log_probs for part in parts]),
    )


def _choose(logits_NV: Tensor, positions_N: Tensor, rows: SamplingRows) -> Choice:
    greedy_N1 = (rows.temperature_N == 0)[:, None] if rows.any_greedy else None
    if rows.any_tempered:
        heat_N1 = rows.temperature_N[:, None]
        if greedy_N1 is not None:
            heat_N1 = torch.where(greedy_N1, 1.0, heat_N1)
        logits_NV = logits_NV / heat_N1
    log_probs = torch.log_softmax(logits_NV, dim=-1)
    support = None
    if rows.cuts:
        support = truncate(log_probs, rows.top_k_N, rows.top_p_N, rows.min_p_N)
        if greedy_N1 is not None:
            # Greedy rows are left whole: what is most likely by its logit need not be first among
            # log-probs that rounding made equal.
            support |= greedy_N1
    scores = log_probs
    if greedy_N1 is not None:
        # Log-softmax may round two close logits to one value; greedy decoding compares the logits.
        scores = torch.where(greedy_N1, logits_NV, log_probs)
    tokens = draw(scores, positions_N, rows, support)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    law = chosen
    if support is not None:
        law = _cut_law(log_probs, chosen, support)
    if greedy_N1 is not None:
        law = torch.where(greedy_N1[:, 0], 0.0, law)
    return Choice(tokens, chosen, law)


def draw(
    scores_NV: Tensor, positions_N: Tensor, rows: SamplingRows, support_NV: Tensor | None = None
) -> Tensor:
    """argmax of scores + G over the tokens in `support_NV`, the lowest id among equals, (N,) int64;
    of the scores alone for greedy rows. A row whose largest score is not finite gets some id.

    `scores_NV` float32: log-probs, or logits over the temperature, which differ by a constant.
    Raises ValueError for positions that are no int64, and for counts that disagree.
    """
    N, V = scores_NV.shape
    if positions_N.dtype != torch.int64 or not len(positions_N) == len(rows.keys_N2) == N:
        raise ValueError(
            f"{N} rows of scores, {len(positions_N)} positions of {positions_N.dtype}, "
            f"{len(rows.keys_N2)} keys"
        )
    if scores_NV.device.type == "cpu" and scores_NV.dtype == torch.float32:
        scores, positions = scores_NV.contiguous(), positions_N.contiguous()
        support = None if support_NV is None else support_NV.contiguous()
        tokens = positions.new_empty(N)
        kernel.draw(
            scores.data_ptr(),
            V,
            rows.keys_N2.data_ptr(),
            positions.data_ptr(),
            rows.temperature_N.data_ptr(),
            0 if support is None else support.data_ptr(),
            tokens.data_ptr(),
            N,
            V,
        )
        return tokens
    wide = scores_NV.to(torch.float64)
    if rows.any_sampled:
        noise = gumbel_noise(rows.keys_N2, positions_N, V)
        if rows.any_greedy:
            noise = noise.masked_fill_((rows.temperature_N == 0)[:, None], 0.0)
        wide = noise.add_(wide)
    if support_NV is not None:
        wide = wide.masked_fill(~support_NV, float("-inf"))
    # A NaN equals nothing, itself included: then no index is found.
    return first_argmax(wide).clamp(max=V - 1)


def first_argmax(scores_NV: Tensor) -> Tensor:
    """Index of the largest value per row, the lowest index among equals, (N,) int64.

    V, the number of columns, for a row with NaN.
    """
    others = scores_NV != scores_NV.amax(-1, keepdim=True)
    # argmax over booleans as uint8 does not promise the first; a running index does.
    ids = torch.arange(scores_NV.shape[1], dtype=torch.int32, device=scores_NV.device)
    return ids.expand_as(others).masked_fill(others, scores_NV.shape[1]).amin(-1).long()


def _cut_law(log_probs: Tensor, chosen: Tensor, support: Tensor) -> Tensor:
    kept = log_probs.to(torch.float64).masked_fill(~support, float("-inf"))
    cut = (chosen.to(torch.float64) - torch.logsumexp(kept, -1)).to(torch.float32)
    # Rounding leaves the whole law's mass off 1 by a bit: a row that nothing cuts must not show
    # whether another row of its batch is cut.
    return torch.where(support.all(-1), chosen, cut)
