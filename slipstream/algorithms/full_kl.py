"""Exact KL between two policies over the full vocabulary, computed from hidden states.

`kl` has the estimators from sampled tokens. Training steps call this module with a reference policy
or a teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.algorithms.head_rows import HeadGradients, check_head, chunks, vocab_size
from slipstream.algorithms.log_probs import DEFAULT_CHUNK_SIZE, check_temperature, log_softmax_rows

KLDirection = Literal["reverse", "forward"]
Product = Callable[[Tensor], Tensor]


def chunked_full_kl(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    ref_hidden_ND: Tensor,
    ref_weight_VD: Tensor | None,
    temperature: float = 1.0,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    direction: KLDirection = "reverse",
    product: Product | None = None,
    ref_product: Product | None = None,
) -> Tensor:
    """KL per token in nats, without N x V logits in memory. With p the policy and q the reference,
    both at `temperature`:

    - `reverse`: KL(p || q) = sum_v p (log p - log q), the expectation of `kl`'s estimators;
    - `forward`: KL(q || p) = sum_v q (log q - log p), as in distillation from a teacher.

    `hidden_ND` (N, D) and `weight_VD` (V, D) are hidden states and LM head of the policy,
    `ref_hidden_ND` (N, D') and `ref_weight_VD` (V, D') those of the reference, which gets no
    gradient. Returns (N,) in float32 (float64 for float64 inputs), differentiable once in the
    policy's inputs. Memory is O(chunk_size V), because the backward pass recomputes the logits.
    `product` and `ref_product` compute x W^T; if a weight is None, the hidden states are logits
    (`chunked_token_log_probs`).

    Source: Kullback and Leibler, 1951; as a penalty: https://arxiv.org/abs/1909.08593, section 2.2.

    Raises:
        ValueError: shapes do not fit, the direction is unknown, or `temperature` or `chunk_size` is
            not positive.
    """
    check_temperature(temperature)
    check_head(hidden_ND, weight_VD, chunk_size)
    check_head(ref_hidden_ND, ref_weight_VD, chunk_size)
    vocab, ref_vocab = vocab_size(hidden_ND, weight_VD), vocab_size(ref_hidden_ND, ref_weight_VD)
    if len(hidden_ND) != len(ref_hidden_ND) or vocab != ref_vocab:
        raise ValueError(
            f"policy and reference must have equal numbers of rows and tokens, got "
            f"{len(hidden_ND)} and {len(ref_hidden_ND)} rows, {vocab} and {ref_vocab} tokens in "
            f"the vocabulary"
        )
    if direction not in ("reverse", "forward"):
        raise ValueError(
            f"unknown KL direction {direction!r}; known: reverse (policy || reference), forward "
            f"(reference || policy)"
        )
    kl: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        hidden_ND,
        weight_VD,
        ref_hidden_ND.detach(),
        None if ref_weight_VD is None else ref_weight_VD.detach(),
        temperature,
        chunk_size,
        direction,
        product,
        ref_product,
    )
    return kl


class _FullKL(torch.autograd.Function):
    """With z the policy's tempered logits and K the KL: dK / dz = p (log p - log q - K) in reverse,
    p - q forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        ref_hidden: Tensor,
        ref_weight: Tensor | None,
        temperature: float,
        chunk_size: int,
        direction: KLDirection,
        product: Product | None,
        ref_product: Product | None,
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        kl = hidden.new_empty(len(hidden), dtype=dtype)
        for rows in chunks(len(hidden), chunk_size):
            log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
            log_q = log_softmax_rows(ref_hidden[rows], ref_weight, temperature, ref_product)
            if direction == "forward":
                log_p, log_q = log_q, log_p
            kl[rows] = log_p.exp().mul_(log_p - log_q).sum(dim=-1)
            del log_p, log_q
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.settings = temperature, chunk_size, direction, product, ref_product
        return kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_kl: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None, None]:
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        temperature, chunk_size, direction, product, ref_product = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grads = HeadGradients(hidden, weight, need_hidden=need_hidden, need_weight=need_weight)
        for rows in chunks(len(hidden), chunk_size):
            log_p = log_softmax_rows(hidden[rows], weight, temperature, product)
            log_q = log_softmax_rows(ref_hidden[rows], ref_weight, temperature, ref_product)
            g = grad_kl[rows].unsqueeze(-1) / temperature
            if direction == "reverse":
                p = log_p.exp()
                grad_logits = log_p.sub_(log_q).sub_(kl[rows].unsqueeze(-1)).mul_(p).mul_(g)
            else:
                grad_logits = log_p.exp_().sub_(log_q.exp_()).mul_(g)
            grads.add(rows, grad_logits)
            del log_p, log_q, grad_logits
        return *grads.result(), None, None, None, None, None, None, None
