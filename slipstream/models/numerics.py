"""Row and width rules of exact mode: what makes a token's numbers independent of its neighbours.

On a CPU compiled kernels compute every row by itself (`has_kernels`); bf16 means there that both
factors of a matrix product are rounded to it, and everything else is fp32 (`activation_dtype`).
Where torch's own
operations are used instead, a matrix product computes row i the same way whatever else is in the
batch only if the row count avoids the library's special cases, and an element-wise operation
handles the last few elements of a buffer with other instructions. The rules here avoid both
(measurements: `docs/log.md`). They are applied by the engine and by the trainer alike, so that both
compute the same bits for the same token.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from slipstream.config.engines import engines_with
from slipstream.errors import ConfigError
from slipstream.kernels.processor import by_intel, words
from slipstream.kernels.team import suited

ROW_MULTIPLE = 4
"""Rows of every fp32 matrix product: the kernels treat rows in blocks of four."""

KEY_CHUNK = {torch.float32: 128, torch.bfloat16: 512}
"""Keys per attention chunk: partial sums end at these multiples of the position."""

KEY_STEP = 16
"""To what multiple the last chunk is padded where `partial_chunks_are_exact`."""

WIDTH_MULTIPLE = 16
"""Hidden, head and inner widths: no vector kernel is left with a remainder, however its work is
split among threads. The vocabulary is exempt: what is computed over it is computed row by row."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_widths(**widths: int) -> None:
    """Refuse widths for which exact mode does not hold. Raises ConfigError naming the multiple."""
    for name, width in widths.items():
        if width % WIDTH_MULTIPLE:
            raise ConfigError(
                f"{name}={width} is not a multiple of {WIDTH_MULTIPLE}, which exact mode needs; "
                "choose another size, or roll out with "
                f"{engines_with(lambda engine: engine.width_multiple == 1)}"
            )


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernels (`kernels`) are for tensors of this kind: what they compute is
    exact for any number of rows."""
    return dtype == torch.float32 and device.type == "cpu" and suited()


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What rows are stored in where `dtype` is computed in: the same, but for bf16 beside the
    kernels, which round only what they multiply (as autocast does), fp32. Keys and values are
    multiplied."""
    narrow = dtype == torch.bfloat16 and has_kernels(torch.float32, device)
    return torch.float32 if narrow else dtype


def row_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """How many rows products need at a time to be exact."""
    return 1 if has_kernels(activation_dtype(dtype, device), device) else ROW_MULTIPLE


def pad_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """(N, ...) -> (N', ...) with N' a multiple of `multiple`, filled with copies of row 0."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])


def key_step(dtype: torch.dtype, device: torch.device) -> int:
    """What the number of keys is rounded up to: whole chunks, or less where that is exact, too."""
    if has_kernels(activation_dtype(dtype, device), device):
        return KEY_STEP
    if dtype == torch.float32 and device.type == "cpu" and partial_chunks_are_exact():
        return KEY_STEP
    return KEY_CHUNK[dtype]


def order_is_kept(device: torch.device) -> bool:
    """Whether sums over keys are taken in the order of positions whatever slots the keys lie in: on
    CPUs, where bits are promised. A GPU's libraries add in orders of their own, and there what
    order takes (keys gathered for each row by itself) would buy nothing."""
    return device.type == "cpu"


def rows_are_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row has the same bits in whatever batch it is computed, so that engine and trainer
    agree on each token: by the kernels, or where torch's own products happen to be like that."""
    kernels = has_kernels(activation_dtype(dtype, device), device)
    return kernels or (device.type == "cpu" and products_are_exact())


@cache
def products_are_exact() -> bool:
    """Whether torch's fp32 products on this CPU obey the rule of `ROW_MULTIPLE`. Measured once:
    OpenBLAS and oneDNN do, MKL on Intel's processors computes few rows another way."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 192, 512):
        x = torch.randn(64, width, generator=generator)
        weight = torch.randn(96, width, generator=generator)
        whole = torch.nn.functional.linear(x, weight)
        for rows in range(ROW_MULTIPLE, 64, ROW_MULTIPLE):
            if not torch.equal(torch.nn.functional.linear(x[:rows].clone(), weight), whole[:rows]):
                return False
    return True


@cache
def partial_chunks_are_exact() -> bool:
    """Whether fp32 products on this CPU give the same bits for a chunk that is cut off where only
    zeros follow. Measured once (milliseconds): it depends on the library's kernels."""
    generator = torch.Generator().manual_seed(0)
    chunk = KEY_CHUNK[torch.float32]
    for width in (16, 32, 64, 128):
        q = torch.randn(3, 12, width, generator=generator)
        keys = torch.randn(3, chunk, width, generator=generator)
        weights = torch.rand(3, 12, chunk, generator=generator)
        scores = torch.bmm(q, keys.transpose(1, 2))
        ones = torch.ones(chunk, WIDTH_MULTIPLE)
        for end in range(KEY_STEP, chunk, KEY_STEP):
            for rows in (ROW_MULTIPLE, 12):
                start, seen = q[:, :rows], keys[:, :end]
                kept = weights[:, :rows].clone()
                kept[:, :, end - 3 :] = 0
                flat, cut = kept.view(-1, chunk), kept[:, :, :end]
                pairs = (
                    (torch.bmm(start, seen.transpose(1, 2)), scores[:, :rows, :end]),
                    (torch.bmm(cut, seen), torch.bmm(kept, keys)),
                    (torch.baddbmm(start, cut, seen), torch.baddbmm(start, kept, keys)),
                    (torch.mm(flat[:, :end], ones[:end]), torch.mm(flat, ones)),
                )
                if not all(torch.equal(left, right) for left, right in pairs):
                    return False
    return True


@cache
def cpu_has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512_BF16, AMX or Arm's BF16).

    Elsewhere bf16 is emulated and slower than fp32.
    """
    return bool(words() & {"avx512_bf16", "amx_bf16", "bf16"})


@cache
def bf16_products_are_faster() -> bool:
    """Whether torch's products of bf16 matrices take less time here than those of fp32.

    Not where bf16 is emulated, nor on Intel's processors without AMX: their instruction for pairs
    takes longer than two fused multiply-adds (docs/log.md).
    """
    return "amx_bf16" in words() or (cpu_has_bf16_units() and not by_intel())


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware has units for it, fp32 elsewhere."""
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bf16_units() else torch.float32
    return torch.bfloat16


def dtype_from_name(name: str, device: torch.device) -> torch.dtype:
    """`auto`, `bfloat16` or `float32` as a dtype for `device`."""
    if name == "auto":
        return default_dtype(device)
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]
