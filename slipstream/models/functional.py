"""The operations of a layer between its matrix products: norms, rotary embedding, gate.

On a CPU in fp32 the compiled kernels (`slipstream.kernels`) compute them, elsewhere torch does.
Both give the same results up to rounding, and both hold to exact mode. All are differentiable.

Shapes: M rows (tokens), D hidden width, I inner width of the MLP, K head width, B sequences, T
tokens of a sequence, H heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels import rows
from slipstream.models.config import ModelConfig
from slipstream.models.numerics import has_kernels
from slipstream.models.rope_frequencies import inverse_frequencies
from slipstream.models.rope_scaling import RopeScaling


def add_norm(
    x_MD: Tensor, delta_MD: Tensor | None, weight: Tensor, eps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its `rms_norm`, (M, D) each. Without a delta the sum is `x` itself."""
    if not has_kernels(x_MD.dtype, x_MD.device):
        total = x_MD if delta_MD is None else x_MD + delta_MD
        return total, rms_norm(total, weight, eps)
    if torch.is_grad_enabled():
        total, normed = _AddNorm.apply(x_MD, delta_MD, weight, eps)  # type: ignore[no-untyped-call]
        return total, normed
    return _add_norm(x_MD, delta_MD, weight, eps)


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up, (M, I), for rows (M, 2I) of gates followed by ups."""
    if not has_kernels(both.dtype, both.device):
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up
    if torch.is_grad_enabled():
        out: Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
        return out
    return _gated(both)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Return x / rms(x) * weight over the last axis, with the mean in fp32 (Zhang, Sennrich 2019).

    `eps` is an fp32 scalar tensor on the device of `x`. Callers create it once, because creating it
    takes as long as the reduction.
    """
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed = wide * scale
    return (normed if x is wide else normed.to(x.dtype)) * weight


def rope_table(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (positions, K) of the model's rotary embeddings (Su et al. 2021).

    They include the model's RoPE scaling. The sine includes the sign of the rotation, so that the
    rotated vector is x * cos + roll(x, K/2) * sin.
    """
    c = config
    return _rope_table(
        c.rope_theta,
        c.rope_scaling,
        c.head_dim,
        c.max_position_embeddings,
        dtype,
        device,
    )


@cache
@torch.inference_mode(False)
def _rope_table(
    theta: float,
    scaling: RopeScaling | None,
    head_dim: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    # One table for all callers, because sines from buffers of other sizes may differ in a bit.
    # Inference mode is off, because the trainer's backward pass needs an ordinary tensor.
    frequencies = inverse_frequencies(theta, head_dim, scaling).to(device)
    angles = torch.arange(positions, device=device).float()[:, None] * frequencies
    magnitude = 1.0 if scaling is None else scaling.magnitude
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rope_at(positions_BT: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the entries of `rope_table` at `positions_BT`, (B, T, 1, K) each, for `rotate`."""
    cos, sin = rope_table(config, dtype, positions_BT.device)
    return cos[positions_BT][:, :, None], sin[positions_BT][:, :, None]


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys (B, T, H, K)."""
    return torch.addcmul(x_BTHK * cos, x_BTHK.roll(x_BTHK.shape[-1] // 2, -1), sin)


def _add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor
) -> tuple[Tensor, Tensor]:
    M, D = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    rows.add_norm(
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        eps.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        M,
        D,
    )
    return total, normed


class _AddNorm(torch.autograd.Function):
    """`add_norm` by the compiled kernels, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total, normed = _add_norm(x, None if delta is None else delta.contiguous(), weight, eps)
        ctx.save_for_backward(total, weight, eps)
        ctx.has_delta = delta is not None
        # The sum after the last layer has no gradient; the kernel then skips that term.
        ctx.set_materialize_grads(False)
        # Without a delta the sum is the input; a view keeps autograd from confusing the two.
        return total.view_as(total) if delta is None else total, normed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normed: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, None]:
        total, weight, eps = ctx.saved_tensors
        M, D = total.shape
        grad = grad_normed.contiguous()
        more = None if grad_total is None else grad_total.contiguous()
        dx = torch.empty_like(total)
        dw = total.new_zeros(torch.get_num_threads(), D)
        rows.norm_backward(
            total.data_ptr(),
            weight.data_ptr(),
            eps.data_ptr(),
            grad.data_ptr(),
            0 if more is None else more.data_ptr(),
            dx.data_ptr(),
            dw.data_ptr(),
            M,
            D,
        )
        return dx, dx if ctx.has_delta else None, dw.sum(0), None


def _gated(both: Tensor) -> Tensor:
    M, inner = len(both), both.shape[1] // 2
    out = both.new_empty(M, inner)
    rows.gate(both.data_ptr(), out.data_ptr(), M, inner)
    return out


class _Gated(torch.autograd.Function):
    """`gated` by the compiled kernels, with its gradient."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _gated(both)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(both)
        M, inner = grad.shape
        rows.gate_backward(both.data_ptr(), grad.data_ptr(), out.data_ptr(), M, inner)
        return out
