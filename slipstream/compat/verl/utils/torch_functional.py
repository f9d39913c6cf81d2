"""verl's module `verl.utils.torch_functional`: masked statistics, log-probs and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.algorithms import masked_whiten, token_log_probs, zero_masked

__all__ = [
    "calculate_sum_pi_squared_from_logits",
    "clip_by_value",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "gather_from_labels",
    "get_response_mask",
    "log_probs_from_logits_response",
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "remove_pad_token",
    "tokenize_and_postprocess_data",
]

_EPSILON = 1e-8
"""Added to the count of a mean, so that the mean of no values is 0."""

Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Return the sum of `values` times `mask` along `axis` (None: all). Masked NaN are ignored."""
    weighted = zero_masked(values, mask) * mask
    return weighted.sum() if axis is None else weighted.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Return the mean of `values` weighted by `mask` along `axis` (None: all); 0 without values.

    `slipstream.algorithms.masked_mean` raises an error instead of returning 0.
    """
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + _EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values whose mask is 1; with n - 1 if `unbiased`.

    Raises ValueError if it is `unbiased` and there are fewer than two values.
    """
    count = mask.sum()
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return variance
    if not bool(count > 1):
        raise ValueError(f"a variance needs at least 2 values, but the mask has {int(count)}")
    return variance * count / (count - 1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Return `x`, limited to the range between two tensors."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """Return the entries (...) of `data` (..., V) at the indices `label` (...)."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probs (...) of `labels` (...) under `logits` (..., V).

    `inplace_backward` is accepted and unused: it concerns flash-attention's kernel.
    """
    flat = token_log_probs(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.reshape(labels.shape)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs (...) of `labels` (...) under `logits` (..., V), in their precision."""
    return gather_from_labels(torch.log_softmax(logits, dim=-1), labels)


def log_probs_from_logits_response(
    input_ids: Tensor, logits: Tensor, response_length: int
) -> Tensor:
    """Return the log-probs (B, R) of the last R ids of `input_ids` (B, T).

    R is `response_length`; `logits` (B, T, V) are those of the whole input.
    """
    before = logits[:, -response_length - 1 : -1]
    return logprobs_from_logits(before, input_ids[:, -response_length:])


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy (...) in nats of the distributions with `logits` (..., V)."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # A probability of 0 has the log-prob -inf; its term of the entropy is 0.
    return -torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return the entropies (N,) in nats of `logits` (N, V), in float32, a chunk of rows at once."""
    return torch.cat(
        [
            entropy_from_logits(logits[at : at + chunk_size].float())
            for at in range(0, len(logits), chunk_size)
        ]
    )


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Return the sum (...) of the squared probabilities of `logits` (..., V)."""
    return torch.softmax(logits, dim=-1).square().sum(-1)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a mask (B, T) that is 1 up to and including the first end token of each row."""
    ends = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(dim=1) - ends == 0).to(dtype)


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> Tensor:
    """Return rows of numbers as a tensor (B, T), padded on the right.

    T is the longest row, or `max_length` if that is longer.
    """
    width = max([*map(len, response), max_length or 0])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Return `tensors` (..., T), padded to `max_seq_len`; unchanged if they are not shorter."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    sides = (missing, 0) if left_pad else (0, missing)
    return torch.nn.functional.pad(tensors, sides, value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[Tensor, Tensor]:
    """Return ids and mask (B, `max_length`), padded or truncated.

    `left` keeps the end, `right` the start, and `middle` half of the length of each. Raises
    ValueError for ids that are too long with `error`, and for another word.
    """
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"truncation={truncation!r} is unknown; use left, right, middle or error")
    length = input_ids.shape[-1]
    if length > max_length and truncation == "error":
        raise ValueError(
            f"{length} tokens are more than max_length={max_length}; set truncation=left, right "
            "or middle"
        )
    start = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation, 0)

    def fitted(values: Tensor, padding: int) -> Tensor:
        if length > max_length:
            end = values.shape[-1] - (max_length - start)
            return torch.cat([values[:, :start], values[:, end:]], dim=-1)
        return pad_sequence_to_length(values, max_length, padding, left_pad)

    return fitted(input_ids, pad_token_id), fitted(attention_mask, 0)


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[Tensor, Tensor]:
    """Return `postprocess_data` of a text without special tokens: ids and mask (1, max_length)."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the ids of each row of (B, T) whose mask is 1."""
    rows = zip(input_ids, attention_mask, strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]
