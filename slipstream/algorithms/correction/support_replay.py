"""Support replay: log-probs of the truncated distribution of top-p, top-k or min-p sampling.

Such a sampler keeps a set K of ids at each position and samples from q(a) = p(a) / p(K). The ratio
p_theta(a) / p_rollout(a) of full-vocabulary probabilities is then not the ratio of the sampling
distributions: it lacks the factor p_rollout(K) / p_theta(K). So its mean under q is not 1, and
importance weights are biased. Support replay uses the K that the rollout recorded for both:

    log q_theta(a) = log p_theta(a) - log p_theta(K),   log p(K) = logsumexp_K z - logsumexp z.

For the rollout's distribution the mass is known without the ids: log p_rollout(K) = log_probs -
sampling_log_probs of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.algorithms.head_rows import HeadGradients, check_head, chunks
from slipstream.algorithms.log_probs import DEFAULT_CHUNK_SIZE, check_temperature, log_softmax_rows


@dataclass(frozen=True, slots=True)
class KeptIds:
    """The kept ids of N positions, ragged: position n has `ids[offsets[n] : offsets[n + 1]]`.

    `ids` is (K,) int64, without repeated ids at a position. `offsets` is (N + 1,) int64. A position
    without ids kept the full vocabulary.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"kept ids and offsets must be int64, got {self.ids.dtype} and {self.offsets.dtype}"
            )
        steps = self.offsets.diff()
        if (
            self.offsets.ndim != 1
            or len(self.offsets) == 0
            or int(self.offsets[0]) != 0
            or int(self.offsets[-1]) != len(self.ids)
            or bool((steps < 0).any())
        ):
            raise ValueError(
                f"offsets of {len(self.ids)} kept ids must rise from 0 to {len(self.ids)}, got "
                f"{self.offsets.tolist()}"
            )

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]], device: torch.device | str | None = None) -> KeptIds:
        """Make it from one list of ids per position."""
        counts = torch.tensor([0, *map(len, kept)], device=device)
        ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(row, np.int64) for row in kept)])
        return cls(torch.from_numpy(ids).to(device), counts.cumsum(0))

    def rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(row, id) of each kept id in a slice of positions; rows count from its start."""
        start, stop, _ = rows.indices(len(self.offsets) - 1)
        counts = self.offsets[start : stop + 1].diff()
        row = torch.arange(stop - start, device=self.ids.device).repeat_interleave(counts)
        return row, self.ids[int(self.offsets[start]) : int(self.offsets[stop])]


def log_probs_on_support(log_probs: Tensor, kept_log_mass: Tensor) -> Tensor:
    """log q(a) = log p(a) - log p(K), the log-probs of the truncated distribution.

    Tensors may have any shape. `kept_log_mass` is log p(K) <= 0 in nats, 0 where nothing was
    truncated. Use this for `log_prob` and `old_log_prob`, each with the mass under its policy, and
    compare with `sampling_log_probs` of the rollout. Differentiable in both arguments.
    """
    return log_probs - kept_log_mass


def support_log_mass(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    kept: KeptIds,
    temperature: float = 1.0,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """log p(K) = logsumexp_K z - logsumexp z per position, with z = logits / temperature.

    `hidden_ND` is (N, D), `weight_VD` (V, D); the logits are their product, and are never all in
    memory. Returns (N,), differentiable once in both, with
    d log p(K) / dz = p restricted to K / p(K) - p. Memory is O(chunk_size V). If `weight_VD` is
    None, `hidden_ND` (N, V) are logits.

    Raises:
        ValueError: shapes do not fit, or `temperature` or `chunk_size` is not positive.
    """
    check_temperature(temperature)
    check_head(hidden_ND, weight_VD, chunk_size)
    _check_positions(len(hidden_ND), kept)
    mass: Tensor = _SupportLogMass.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, kept, temperature, chunk_size, product
    )
    return mass


class _SupportLogMass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        kept: KeptIds,
        temperature: float,
        chunk_size: int,
        product: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        mass = hidden.new_zeros(len(hidden), dtype=dtype)
        for rows in chunks(len(hidden), chunk_size):
            row, ids = kept.rows(rows)
            if len(ids):
                log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
                mass[rows] = _log_sums(log_p[row, ids], row, len(log_p))
        ctx.save_for_backward(hidden, weight, mass)
        ctx.settings = kept, temperature, chunk_size, product
        return mass

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_mass: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, mass = ctx.saved_tensors
        kept, temperature, chunk_size, product = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grads = HeadGradients(hidden, weight, need_hidden=need_hidden, need_weight=need_weight)
        for rows in chunks(len(hidden), chunk_size):
            row, ids = kept.rows(rows)
            if not len(ids):
                continue
            log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
            within = (log_p[row, ids] - mass[rows][row]).exp()
            # Where nothing was truncated the mass is constant 1, so the gradient is 0.
            cut = torch.zeros_like(mass[rows]).index_fill_(0, row, 1.0)
            grad_logits = log_p.exp_().mul_(-cut[:, None])
            grad_logits.index_put_((row, ids), within, accumulate=True)
            grad_logits.mul_(grad_mass[rows][:, None] / temperature)
            grads.add(rows, grad_logits)
        return *grads.result(), None, None, None, None


def _log_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """logsumexp of the values of each row; 0 for a row without any."""
    top = values.new_full((num_rows,), -torch.inf).scatter_reduce_(0, row, values, "amax")
    sums = values.new_zeros(num_rows).index_add_(0, row, (values - top[row]).exp())
    return torch.where(sums > 0, top + sums.log(), 0.0)


def _check_positions(num_rows: int, kept: KeptIds) -> None:
    if len(kept.offsets) != num_rows + 1:
        raise ValueError(
            f"kept ids of {len(kept.offsets) - 1} positions do not fit {num_rows} rows"
        )
