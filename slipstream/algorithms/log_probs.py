"""Log-probs and entropies of given tokens, from logits or straight from hidden states.

Everything is computed in float32 (float64 inputs stay float64), whatever the model's precision,
and row by row with the same operations: LM head product, cast, division by the temperature,
log-softmax. The inference engine computes the same ones, so that its log-probs and the trainer's
agree to the last bit. Called by training steps. Knows nothing about models or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.algorithms.head_rows import HeadGradients, check_head, chunks, num_words

DEFAULT_CHUNK_SIZE = 512
"""Rows whose logits exist at once: 512 rows of 150,000 words are 0.3 GB in float32."""

DEFAULT_KEEP_BYTES = 600_000_000
"""What trainers keep of logits for the backward pass: half of those of 8,192 tokens and 32,768
words, where computing all of them again would make a pass slower than one that keeps them all."""

_MIN_GEMM_ROWS = 12
_GEMM_ROW_MULTIPLE = 4


def token_log_probs(logits_NV: Tensor, labels_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the labels.

    `logits_NV` (..., V), `labels_N` (...) integer; returns (...), float32 (float64 for float64).

    Raises:
        ValueError: `temperature` is not positive: a greedy policy has no log-probs.
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
    """Log-probs of `labels_N` and entropies under the LM head, never holding N x V logits.

    `hidden_ND` (N, D) are inputs of the LM head `weight_VD` (V, D); returns two (N,) tensors,
    float32 (float64 for float64 inputs), differentiable once in `hidden_ND` and `weight_VD`. Memory
    is O(chunk_size V): the backward pass computes the logits again, except of as many first chunks
    as fit in `keep_bytes` until then. Row i of the result does not depend on N, `chunk_size` or
    `keep_bytes`, to the last bit. `product` computes x W^T into fresh memory, where the engine has
    a faster kernel for it than `F.linear`. Where `weight_VD` is None, `hidden_ND` (N, V) are logits
    already.

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
    """sum_v p_v^2 of each row's distribution, for the optimal token baseline; without gradient.

    Shapes, memory and `product` as in `chunked_token_log_probs`; returns (N,) in (0, 1].

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
        # One for all chunks: large fresh memory costs as much as what is computed in it.
        scratch = hidden.new_empty(
            min(chunk_size, len(hidden)), num_words(hidden, weight), dtype=dtype
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
            # What was kept is used up here; a second backward pass computes it again.
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
    """(n, V) log-probs of n rows, all that `chunked_token_log_probs` holds at once; each row's bits
    do not depend on n."""
    logits = _head_logits(hidden, weight, temperature, product)
    return torch.log_softmax(logits, dim=-1, out=_in_place(logits))


def softmax_rows(
    hidden: Tensor,
    weight: Tensor | None,
    temperature: float,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """exp of `log_softmax_rows` but for rounding, in a third of the time of its softmax."""
    logits = _head_logits(hidden, weight, temperature, product)
    return torch.softmax(logits, dim=-1, out=_in_place(logits))


def _head_logits(
    hidden: Tensor,
    weight: Tensor | None,
    temperature: float,
    product: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    if weight is None:
        # Fresh memory: softmax writes over it.
        return _tempered(hidden.clone(), temperature)
    rows = _pad_rows(hidden)
    logits = (F.linear(rows, weight) if product is None else product(rows))[: len(hidden)]
    return _tempered(logits, temperature)


def _in_place(logits: Tensor) -> Tensor | None:
    """Where softmax may write its result: on CPU over its input, as it ends with each row before
    it begins the next one; elsewhere kernels promise no such thing."""
    return logits if logits.device.type == "cpu" else None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 1:
        return logits
    # Divide by a tensor, as the engine does: by a number, CUDA multiplies with the reciprocal.
    return logits / torch.full((), temperature, dtype=logits.dtype, device=logits.device)


def _pad_rows(hidden: Tensor) -> Tensor:
    """Zero rows up to a multiple of 4 and at least 12: from there on, the float32 and float64
    matrix products on CPU compute each row independently of how many rows there are (where D is a
    multiple of 4, as in models: others of small heads also depend on where the row lies)."""
    if hidden.dtype not in (torch.float32, torch.float64):
        return hidden
    n = len(hidden)
    multiple = -(-n // _GEMM_ROW_MULTIPLE) * _GEMM_ROW_MULTIPLE
    return F.pad(hidden, (0, 0, 0, max(multiple, _MIN_GEMM_ROWS) - n))


def check_temperature(temperature: float) -> None:
    """ValueError where there are no log-probs: a temperature that is not positive."""
    if not temperature > 0:
        raise ValueError(
            f"log-probs need temperature > 0, got {temperature}; greedy responses are scored at "
            f"the temperature that the policy trains at"
        )
