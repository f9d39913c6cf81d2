"""Choose the next token of each row as the argmax of log p + G, an exact sample (Gumbel-max).

This rule makes speculative decoding lossless: the token is a function of the target's logits and
the keyed noise alone (`noise`). So the result is the same whatever the drafter proposed.

Shapes: N rows (positions that need a token), V vocabulary.
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

    `keys_N2` is int32; `temperature_N` is float32 with 0 for greedy rows; `top_k_N` is int64.
    `top_p_N` and `min_p_N` are float64, because a rounded limit could add a token. `any_truncated`
    says whether any row truncates. If none does, `top_k_N`, `top_p_N` and `min_p_N` are not read.
    """

    keys_N2: Tensor
    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    any_sampled: bool
    any_greedy: bool
    any_tempered: bool
    any_truncated: bool

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
        """Return the settings with one row for each entry of the lists."""
        truncates = [
            k > 0 or p < 1 or m > 0 for k, p, m in zip(top_ks, top_ps, min_ps, strict=True)
        ]
        return cls(
            keys_N2=torch.tensor(keys, dtype=torch.int32, device=device),
            temperature_N=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_k_N=torch.tensor(top_ks, device=device),
            top_p_N=torch.tensor(top_ps, dtype=torch.float64, device=device),
            min_p_N=torch.tensor(min_ps, dtype=torch.float64, device=device),
            any_sampled=any(t > 0 for t in temperatures),
            any_greedy=any(t == 0 for t in temperatures),
            any_tempered=any(t not in (0, 1) for t in temperatures),
            any_truncated=any(truncates),
        )

    @property
    def kinds(self) -> tuple[bool, bool, bool]:
        """The flags that determine the operations of `choose` if no row truncates."""
        return self.any_sampled, self.any_greedy, self.any_tempered

    def without_truncation(self, keys_N2: Tensor, temperature_N: Tensor) -> SamplingRows:
        """Return rows of the same `kinds` without truncation, with new keys and temperatures."""
        unused = torch.zeros(len(keys_N2), dtype=torch.int64, device=keys_N2.device)
        return replace(
            self,
            keys_N2=keys_N2,
            temperature_N=temperature_N,
            top_k_N=unused,
            top_p_N=unused,
            min_p_N=unused,
            any_truncated=False,
        )

    def repeated(self, times: int) -> SamplingRows:
        """Return the settings with each row repeated `times` times in succession."""
        return replace(
            self,
            keys_N2=self.keys_N2.repeat_interleave(times, 0),
            temperature_N=self.temperature_N.repeat_interleave(times),
            top_k_N=self.top_k_N.repeat_interleave(times),
            top_p_N=self.top_p_N.repeat_interleave(times),
            min_p_N=self.min_p_N.repeat_interleave(times),
        )

    def part(self, rows: slice | Tensor) -> SamplingRows:
        """Return the settings of some rows: a slice, or int64 indices, which may repeat."""

        def of(settings: Tensor) -> Tensor:
            # index_select takes half the time of indexing, and every step with trees needs it.
            return settings[rows] if isinstance(rows, slice) else settings.index_select(0, rows)

        truncated = self.any_truncated
        return SamplingRows(
            keys_N2=of(self.keys_N2),
            temperature_N=of(self.temperature_N),
            top_k_N=of(self.top_k_N) if truncated else self.top_k_N,
            top_p_N=of(self.top_p_N) if truncated else self.top_p_N,
            min_p_N=of(self.min_p_N) if truncated else self.min_p_N,
            any_sampled=self.any_sampled,
            any_greedy=self.any_greedy,
            any_tempered=self.any_tempered,
            any_truncated=truncated,
        )


ELEMENTS_AT_ONCE = 1 << 18
"""On a CPU, `choose` processes rows in blocks of this number of logits. Larger temporaries would be
newly allocated each time, which takes as long as the computation in them."""

FEWEST_AT_ONCE = 4
"""The minimum number of rows in such a block. It is also at least the number of threads, because
they share a draw by rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen tokens (N,) int64 with two log-probs (N,) float32.

    `log_probs` is the log-softmax over the full vocabulary at the sampling temperature (1 for
    greedy rows). A trainer recomputes it. `sampling_log_probs` is the log-prob under the
    distribution from which the token was drawn, after truncation. It is 0 for greedy rows, whose
    distribution is a point mass. A row with a NaN or infinite logit has the log-prob NaN and an
    arbitrary token.
    """

    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


def choose(
    logits_NV: Tensor, positions_N: Tensor, rows: SamplingRows, ids_V: Tensor | None = None
) -> Choice:
    """Choose one token per row.

    `logits_NV` is float32. `positions_N` are the absolute positions of the tokens, int64. `ids_V`
    (int64) are the token ids of the columns in ascending order, if these are a part of the
    vocabulary; None: 0 to V - 1. Distributions are over the columns only.
    """
    count, vocab_size = logits_NV.shape
    at_once = max(FEWEST_AT_ONCE, torch.get_num_threads(), ELEMENTS_AT_ONCE // vocab_size)
    if count <= at_once or logits_NV.is_cuda:
        return _choose(logits_NV, positions_N, rows, ids_V)
    parts = []
    for start in range(0, count, at_once):
        b = slice(start, start + at_once)
        parts.append(_choose(logits_NV[b], positions_N[b], rows.part(b), ids_V))
    return Choice(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.log_probs for part in parts]),
        torch.cat([part.sampling_log_probs for part in parts]),
    )


def _choose(
    logits_NV: Tensor, positions_N: Tensor, rows: SamplingRows, ids_V: Tensor | None
) -> Choice:
    greedy_N1 = (rows.temperature_N == 0)[:, None] if rows.any_greedy else None
    logits_NV = tempered(logits_NV, rows)
    log_probs = torch.log_softmax(logits_NV, dim=-1)
    support = None
    if rows.any_truncated:
        support = truncate(log_probs, rows.top_k_N, rows.top_p_N, rows.min_p_N)
        if greedy_N1 is not None:
            # Greedy rows are not truncated: rounding may give the token with the largest logit the
            # same log-prob as another token, and truncation could then remove it.
            support |= greedy_N1
    scores = log_probs
    if greedy_N1 is not None:
        # Log-softmax may round close logits to one value, so greedy decoding compares the logits.
        scores = torch.where(greedy_N1, logits_NV, log_probs)
    columns = draw(scores, positions_N, rows, support, ids_V)
    chosen = log_probs.gather(1, columns[:, None])[:, 0]
    sampling = chosen
    if support is not None:
        sampling = _truncated_log_probs(log_probs, chosen, support)
    if greedy_N1 is not None:
        sampling = torch.where(greedy_N1[:, 0], 0.0, sampling)
    return Choice(columns if ids_V is None else ids_V[columns], chosen, sampling)


def tempered(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
    """Return logits (N, V) divided by the temperatures. Greedy rows are not changed."""
    if not rows.any_tempered:
        return logits_NV
    heat_N = rows.temperature_N
    if rows.any_greedy:
        heat_N = torch.where(heat_N == 0, 1.0, heat_N)
    return logits_NV / heat_N[:, None]


def draw(
    scores_NV: Tensor,
    positions_N: Tensor,
    rows: SamplingRows,
    support_NV: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> Tensor:
    """Return the column of the argmax of scores + G over `support_NV`, (N,) int64.

    Equal sums go to the lowest id. Greedy rows use the scores without noise. A row whose largest
    score is not finite gets an arbitrary id. `scores_NV` (float32) are log-probs, or logits divided
    by the temperature, which differ from them by a constant. `ids_V` is as in `choose`.

    Raises ValueError if positions or ids are not int64, or if numbers of rows or columns differ.
    """
    N, V = scores_NV.shape
    if ids_V is not None and (ids_V.dtype != torch.int64 or ids_V.shape != (V,)):
        raise ValueError(f"{V} columns, but ids of shape {tuple(ids_V.shape)}, {ids_V.dtype}")
    if positions_N.dtype != torch.int64 or not len(positions_N) == len(rows.keys_N2) == N:
        raise ValueError(
            f"{N} rows of scores, {len(positions_N)} positions of {positions_N.dtype}, "
            f"{len(rows.keys_N2)} keys"
        )
    if scores_NV.device.type == "cpu" and scores_NV.dtype == torch.float32:
        scores, positions = scores_NV.contiguous(), positions_N.contiguous()
        support = None if support_NV is None else support_NV.contiguous()
        ids = None if ids_V is None else ids_V.contiguous()
        tokens = positions.new_empty(N)
        kernel.draw(
            scores.data_ptr(),
            V,
            rows.keys_N2.data_ptr(),
            positions.data_ptr(),
            rows.temperature_N.data_ptr(),
            0 if support is None else support.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            tokens.data_ptr(),
            N,
            V,
        )
        return tokens
    wide = scores_NV.to(torch.float64)
    if rows.any_sampled:
        noise = gumbel_noise(rows.keys_N2, positions_N, V if ids_V is None else ids_V)
        if rows.any_greedy:
            noise = noise.masked_fill_((rows.temperature_N == 0)[:, None], 0.0)
        wide = noise.add_(wide)
    if support_NV is not None:
        wide = wide.masked_fill(~support_NV, float("-inf"))
    # NaN equals nothing, not even itself, so a row with NaN has no argmax.
    return first_argmax(wide).clamp(max=V - 1)


def first_argmax(scores_NV: Tensor) -> Tensor:
    """Return the index of the largest value per row, (N,) int64.

    Equal values go to the lowest index. A row with NaN gets V, the number of columns.
    """
    others = scores_NV != scores_NV.amax(-1, keepdim=True)
    # torch's argmax does not promise the first index; the minimum over indices does.
    ids = torch.arange(scores_NV.shape[1], dtype=torch.int32, device=scores_NV.device)
    return ids.expand_as(others).masked_fill(others, scores_NV.shape[1]).amin(-1).long()


def _truncated_log_probs(log_probs: Tensor, chosen: Tensor, support: Tensor) -> Tensor:
    """Return the log-probs of the chosen tokens, renormalized over the support, (N,)."""
    kept = log_probs.to(torch.float64).masked_fill(~support, float("-inf"))
    truncated = (chosen.to(torch.float64) - torch.logsumexp(kept, -1)).to(torch.float32)
    # Because of rounding, probabilities do not sum to exactly 1. A row without truncation keeps its
    # log-prob, so that it does not depend on whether other rows of the batch truncate.
    return torch.where(support.all(-1), chosen, truncated)
