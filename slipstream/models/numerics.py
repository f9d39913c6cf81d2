"""The rules of exact mode that make a token's results independent of the rest of its batch.

On a CPU the compiled kernels compute each row (token) independently (`has_kernels`). There, bf16
means that both factors of a matrix product are rounded to bf16. Everything else is fp32
(`activation_dtype`).

With torch's operations two effects must be avoided. The library behind a matrix product computes a
row differently for some row counts. And an element-wise operation uses other instructions for the
last few elements of a buffer. The rules for row counts and widths here avoid both (measurements:
`docs/log/exact_mode.md`). Engine and trainer apply the same rules, so both compute the same bits
for the same token.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from slipstream.config.engines import engines_with
from slipstream.errors import ConfigError
from slipstream.kernels.processor import cpu_flags, is_intel
from slipstream.kernels.team import kernels_supported

ROW_MULTIPLE = 4
"""The row count of torch's matrix products must be a multiple of this: the math libraries process
rows in blocks of four."""

KEY_CHUNK = {torch.float32: 128, torch.bfloat16: 512}
"""Keys per attention chunk: partial sums end at positions that are multiples of this."""

KEY_STEP = 16
"""The last chunk is padded to a multiple of this if `partial_chunks_are_exact`."""

WIDTH_MULTIPLE = 16
"""Hidden, head and inner widths must be multiples of this. Then no vector operation has leftover
elements, however its work is split among threads. The vocabulary is exempt, because operations over
it run row by row."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_widths(**widths: int) -> None:
    """Raise ConfigError if a width does not allow exact mode; the error names the multiple."""
    for name, width in widths.items():
        if width % WIDTH_MULTIPLE:
            raise ConfigError(
                f"{name}={width} is not a multiple of {WIDTH_MULTIPLE}, which exact mode needs; "
                "choose another size, or set for rollouts "
                f"{engines_with(lambda engine: engine.width_multiple == 1)}"
            )


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the compiled kernels (`slipstream.kernels`) support this dtype and device.

    Their results are exact for any number of rows.
    """
    return dtype == torch.float32 and device.type == "cpu" and kernels_supported()


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of activations for the compute dtype `dtype`.

    It is `dtype`, except for bf16 with the kernels: these round only the factors of products, as
    autocast does, so activations are fp32. Keys and values are factors, so they are bf16.
    """
    rounds_factors = dtype == torch.bfloat16 and has_kernels(torch.float32, device)
    return torch.float32 if rounds_factors else dtype


def row_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """Return the multiple to which the row count of exact products must be padded."""
    return 1 if has_kernels(activation_dtype(dtype, device), device) else ROW_MULTIPLE


def pad_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Pad with copies of row 0: (N, ...) -> (N', ...), N' a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])


def key_step(dtype: torch.dtype, device: torch.device) -> int:
    """Return the multiple to which the number of keys is rounded up.

    It is a whole chunk, or less if that is exact, too.
    """
    if has_kernels(activation_dtype(dtype, device), device):
        return KEY_STEP
    if dtype == torch.float32 and device.type == "cpu" and partial_chunks_are_exact():
        return KEY_STEP
    return KEY_CHUNK[dtype]


def sums_in_key_order(device: torch.device) -> bool:
    """Return whether sums over keys must run in the order of positions, whatever their slots.

    CPUs need this for exact mode. GPU libraries choose their own order, so gathering the keys of
    each row in order would be wasted time there.
    """
    return device.type == "cpu"


def rows_are_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a row has the same bits in any batch, so that engine and trainer agree.

    This holds with the compiled kernels, and on CPUs where torch's products have this property.
    """
    kernels = has_kernels(activation_dtype(dtype, device), device)
    return kernels or (device.type == "cpu" and products_are_exact())


@cache
def products_are_exact() -> bool:
    """Return whether torch's fp32 products on this CPU are exact for multiples of `ROW_MULTIPLE`.

    The function measures it once. OpenBLAS and oneDNN are exact; MKL on Intel processors computes
    small row counts differently.
    """
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
    """Return whether fp32 products on this CPU keep their bits if trailing zeros of a chunk go.

    The function measures it once (a few milliseconds), because it depends on the math library.
    """
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
                padded = weights[:, :rows].clone()
                padded[:, :, end - 3 :] = 0
                flat, cut = padded.view(-1, chunk), padded[:, :, :end]
                pairs = (
                    (torch.bmm(start, seen.transpose(1, 2)), scores[:, :rows, :end]),
                    (torch.bmm(cut, seen), torch.bmm(padded, keys)),
                    (torch.baddbmm(start, cut, seen), torch.baddbmm(start, padded, keys)),
                    (torch.mm(flat[:, :end], ones[:end]), torch.mm(flat, ones)),
                )
                if not all(torch.equal(left, right) for left, right in pairs):
                    return False
    return True


@cache
def cpu_has_bf16_units() -> bool:
    """Return whether this CPU multiplies bf16 in hardware (AVX512_BF16, AMX or Arm's BF16).

    Other CPUs emulate bf16, which is slower than fp32.
    """
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


@cache
def bf16_products_are_faster() -> bool:
    """Return whether torch's bf16 matrix products are faster on this CPU than fp32 products.

    They are slower if bf16 is emulated, and on Intel processors without AMX: there the bf16 pair
    instruction takes longer than two fused multiply-adds (docs/log/training_step.md).
    """
    return "amx_bf16" in cpu_flags() or (cpu_has_bf16_units() and not is_intel())


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 if the device multiplies it in hardware, else fp32."""
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bf16_units() else torch.float32
    return torch.bfloat16


def dtype_from_name(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for `auto`, `bfloat16` or `float32`. Raises ConfigError for other names."""
    if name == "auto":
        return default_dtype(device)
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]
