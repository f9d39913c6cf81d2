"""Log-probs and entropies of given tokens, from logits or from hidden states.

Computation is in float32 (float64 for float64 inputs) with any dtype of the model. Each row is
computed with the same operations: LM head product, cast, division by the temperature, log-softmax.
The inference engine uses the same operations, so its log-probs are bitwise equal to the trainer's.
Training steps call this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.algorithms.head_rows import HeadGradients, check_head, chunks, vocab_size

DEFAULT_CHUNK_SIZE = 512
"""Rows whose logits are in memory at once: 512 rows with a vocabulary of 150,000 are 0.3 GB in
float32."""

DEFAULT_KEEP_BYTES = 600_000_000
"""Bytes of logits that trainers keep for the backward pass: half the logits of 8,192 tokens with a
vocabulary of 32,768. At that size, recomputing all logits would be slower than keeping them."""

_MIN_GEMM_ROWS = 12
_GEMM_ROW_MULTIPLE = 4


def token_log_probs(logits_NV: Tensor, labels_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the labels.

    `logits_NV` is (..., V), `labels_N` (...) integer. Returns (...) in float32 (float64 for
    float64).

    Raises:
        ValueError: `temperature` is not positive; a greedy policy has no log-probs.
    """
    check_temperature(temperature)
    log_p = torch.log_softmax(_tempered(logits_NV, temperature), dim=-1)
    return log_p.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)


def chunked_token_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    labels_N: Tensor,
    temperature: float = 1.0,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    keep_bytes: int = 0,
    product: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels_N` and entropies under the LM head, without N x V logits in memory.

    `hidden_ND` (N, D) are the inputs of the LM head `weight_VD` (V, D). Returns two tensors (N,) in
    float32 (float64 for float64 inputs), differentiable once in `hidden_ND` and `weight_VD`. Memory
    is O(chunk_size V): the backward pass recomputes the logits, except for the first chunks that
    fit in `keep_bytes`. Row i of the result is bitwise independent of N, `chunk_size` and
    `keep_bytes`. `product` computes x W^T into new memory, if there is a faster kernel than
    `F.linear`. If `weight_VD` is None, `hidden_ND` (N, V) are logits.

    Raises:
        ValueError: shapes do not fit, `temperature` or `chunk_size` is not positive, or
            `keep_bytes` is negative.
    """
    check_temperature(temperature)
    if keep_bytes < 0:
        raise ValueError(f"keep_bytes must be >= 0, got {keep_bytes}")
    check_head(hidden_ND, weight_VD, chunk_size)
    if labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"expected labels (N,) for hidden (N, D), got {tuple(labels_N.shape)} and "
            f"{tuple(hidden_ND.shape)}"
        )
    if not torch.is_grad_enabled():
        keep_bytes = 0
    outputs: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, labels_N, temperature, chunk_size, keep_bytes, product
    )
    return outputs


@torch.no_grad()
def chunked_sum_pi_squared(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    temperature: float = 1.0,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """sum_v p_v^2 of each row's distribution, for the optimal token baseline. Has no gradient.

    Shapes, memory and `product` are as in `chunked_token_log_probs`. Returns (N,) with values in
    (0, 1].

    Raises:
        ValueError: shapes do not fit, or `temperature` or `chunk_size` is not positive.
    """
    check_temperature(temperature)
    check_head(hidden_ND, weight_VD, chunk_size)
    dtype = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    sums = hidden_ND.new_empty(len(hidden_ND), dtype=dtype)
    for rows in chunks(len(hidden_ND), chunk_size):
        log_p = log_softmax_rows(hidden_ND[rows], weight_VD, temperature, product)
        sums[rows] = log_p.mul_(2).exp_().sum(dim=-1)
    return sums


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward and backward of `chunked_token_log_probs`.

    With z the tempered logits, p = softmax(z), H the entropy and j the label:
    d log p_j / dz = onehot(j) - p and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        keep_bytes: int,
        product: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        entropies = torch.empty_like(log_probs)
        # One buffer for all chunks: allocating large memory takes as long as computing in it.
        scratch = hidden.new_empty(
            min(chunk_size, len(hidden)), vocab_size(hidden, weight), dtype=dtype
        )
        kept: dict[int, Tensor] = {}
        for rows in chunks(len(hidden), chunk_size):
            log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
            log_probs[rows] = log_p.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
            p = torch.exp(log_p, out=scratch[: len(log_p)])
            entropies[rows] = -(p.mul_(log_p)).sum(dim=-1)
            keep_bytes -= log_p.untyped_storage().nbytes()
            if keep_bytes >= 0:
                kept[rows.start] = log_p
            del log_p
        ctx.save_for_backward(hidden, weight, labels, entropies)
        ctx.settings = temperature, chunk_size, product
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, labels, entropies = ctx.saved_tensors
        temperature, chunk_size, product = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grads = HeadGradients(hidden, weight, need_hidden=need_hidden, need_weight=need_weight)
        for rows in chunks(len(hidden), chunk_size):
            # Kept chunks are overwritten here; a second backward pass recomputes them.
            log_p = ctx.kept.pop(rows.start, None)
            if grad_entropies is None:
                if log_p is None:
                    p = softmax_rows(hidden[rows], weight, temperature, product)
                else:
                    p = log_p.exp_()
                grad_logits = None
            else:
                if log_p is None:
                    log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
                p = log_p.exp()
                g = grad_entropies[rows].unsqueeze(-1) / temperature
                grad_logits = log_p.add_(entropies[rows].unsqueeze(-1)).mul_(p).mul_(-g)
            if grad_log_probs is not None:
                g = grad_log_probs[rows].unsqueeze(-1) / temperature
                p.mul_(-g).scatter_add_(-1, labels[rows].unsqueeze(-1), g)
                grad_logits = p if grad_logits is None else grad_logits.add_(p)
            if grad_logits is not None:
                grads.add(rows, grad_logits)
            del log_p, p, grad_logits
        return *grads.result(), None, None, None, None, None


def log_softmax_rows(
    hidden: Tensor,
    weight: Tensor | None,
    temperature: float,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Log-probs (n, V) of n rows. Each row is bitwise independent of n."""
    logits = _head_logits(hidden, weight, temperature, product)
    return torch.log_softmax(logits, dim=-1, out=_in_place(logits))


def softmax_rows(
    hidden: Tensor,
    weight: Tensor | None,
    temperature: float,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Probabilities (n, V), up to rounding the exp of `log_softmax_rows`, in a third of the
    time."""
    logits = _head_logits(hidden, weight, temperature, product)
    return torch.softmax(logits, dim=-1, out=_in_place(logits))


def _head_logits(
    hidden: Tensor,
    weight: Tensor | None,
    temperature: float,
    product: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    if weight is None:
        # A copy, because softmax overwrites it.
        return _tempered(hidden.clone(), temperature)
    rows = _pad_rows(hidden)
    logits = (F.linear(rows, weight) if product is None else product(rows))[: len(hidden)]
    return _tempered(logits, temperature)


def _in_place(logits: Tensor) -> Tensor | None:
    """The output tensor of a softmax over `logits`. On CPU it is the input, because the kernel
    finishes each row before the next; other devices' kernels do not guarantee this."""
    return logits if logits.device.type == "cpu" else None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 1:
        return logits
    # Divide by a tensor like the engine does: for a number, CUDA multiplies by the reciprocal.
    return logits / torch.full((), temperature, dtype=logits.dtype, device=logits.device)


def _pad_rows(hidden: Tensor) -> Tensor:
    """Pad with zero rows to a multiple of 4 and at least 12.

    With such numbers of rows, float32 and float64 matrix products on CPU compute each row
    independently of the number of rows, if D is a multiple of 4, as in models. With other D and
    small heads a result also depends on the row's alignment in memory.
    """
    if hidden.dtype not in (torch.float32, torch.float64):
        return hidden
    n = len(hidden)
    multiple = -(-n // _GEMM_ROW_MULTIPLE) * _GEMM_ROW_MULTIPLE
    return F.pad(hidden, (0, 0, 0, max(multiple, _MIN_GEMM_ROWS) - n))


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is positive."""
    if not temperature > 0:
        raise ValueError(
            f"log-probs need temperature > 0, got {temperature}; score greedy responses at the "
            f"temperature that the policy is trained at"
        )
