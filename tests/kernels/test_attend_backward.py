"""Gradients of causal attention, compared with autograd in fp64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attend_backward import attend_backward
from slipstream.kernels.attend_backward_bf16 import USE_BF16
from slipstream.kernels.processor import NO_BF16_BACKWARD
from slipstream.kernels.product_amx import USE_AMX


def sample(B: int, T: int, Q: int, H: int, K: int) -> dict[str, Tensor]:
    """Return scaled queries, keys, values and the gradient of the result, in fp64."""
    generator = torch.Generator().manual_seed(T)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(B, T, Q, K) * 2 * K**-0.5,
        "k": draw(B, H, T, K),
        "v": draw(B, H, T, K),
        "grad": draw(B, T, Q, K),
    }


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result (B, T, Q, K) and the logarithms of the denominators (B, T, Q)."""
    T, G = q.shape[1], q.shape[2] // k.shape[1]
    scores = q.transpose(1, 2) @ k.repeat_interleave(G, 1).transpose(2, 3)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(G, 1)
    return out.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def by_kernel(given: dict[str, Tensor], *, bf16: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kernel's gradients: dq (B, T, Q, K), dk and dv (B, T, H, K)."""
    (B, T, Q, K), H = given["q"].shape, given["k"].shape[1]
    out, logs = attention(given["q"], given["k"], given["v"])
    q, k, v, grad, out, logs = (
        x.float().contiguous()
        for x in (given["q"], given["k"], given["v"], given["grad"], out, logs)
    )
    # Keys of the sequences in reverse order, with an unused slot between two sequences.
    k, v = (_in_a_row(x) for x in (k, v))
    starts, slots = torch.arange(B + 1) * T, torch.arange(B).flip(0) * (T + 1)
    dq = torch.full((B, T, Q, K), float("nan"))
    dk = torch.full((B, T, H, K), float("nan"))
    # Gradients of values are written next to other data, which must not change.
    dv = torch.full((B, T, H * K + 3), 7.0)
    attend_backward(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        grad.data_ptr(),
        out.data_ptr(),
        logs.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv[..., 3:].data_ptr(),
        dv.stride(1) * 4,
        starts.data_ptr(),
        slots.data_ptr(),
        B,
        k.shape[1],
        T,
        Q,
        H,
        K,
        work=1 << 20,
        bf16=bf16,
    )
    assert bool((dv[..., :3] == 7).all())
    return dq, dk, dv[..., 3:].reshape(B, T, H, K)


def _in_a_row(x: Tensor) -> Tensor:
    """Return keys or values (B, H, T, K) in the kernel's layout (H, S, K)."""
    spread = torch.nn.functional.pad(x.flip(0), (0, 0, 0, 1), value=float("nan"))
    return spread.transpose(0, 1).flatten(1, 2).contiguous()


@pytest.mark.parametrize(
    ("B", "T", "Q", "H", "K"),
    [
        (1, 1, 1, 1, 16),
        (2, 5, 4, 2, 8),
        (3, 47, 2, 2, 24),
        (2, 48, 6, 2, 32),
        (2, 49, 3, 1, 32),
        (3, 145, 4, 2, 64),
    ],
)
def test_gradients_match_autograd(B: int, T: int, Q: int, H: int, K: int) -> None:
    given = sample(B, T, Q, H, K)
    inputs = [given[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out, _ = attention(*inputs)
    dq, dk, dv = torch.autograd.grad(out, inputs, given["grad"])
    expected = (dq, dk.transpose(1, 2), dv.transpose(1, 2))
    for found, exact in zip(by_kernel(given), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("B", "T", "Q", "H", "K"),
    [
        (1, 1, 1, 1, 32),
        (2, 31, 2, 2, 32),
        (2, 32, 6, 2, 32),
        (3, 47, 4, 2, 64),
        (2, 145, 3, 1, 32),
        (1, 130, 2, 1, 96),
        # A head width that the kernel of bf16 instructions does not support.
        (2, 20, 2, 2, 48),
    ],
)
def test_gradients_with_bf16_rounding_match_autograd(
    B: int, T: int, Q: int, H: int, K: int
) -> None:
    given = {name: x.bfloat16().double() for name, x in sample(B, T, Q, H, K).items()}
    inputs = [given[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out, _ = attention(*inputs)
    dq, dk, dv = torch.autograd.grad(out, inputs, given["grad"])
    expected = (dq, dk.transpose(1, 2), dv.transpose(1, 2))
    for found, exact in zip(by_kernel(given, bf16=True), expected, strict=True):
        error = (found.double() - exact).norm() / exact.norm().clamp(min=1e-9)
        # The query and key of a single token have no gradient.
        assert error < 2**-7 or exact.norm() < 1e-9
        torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


def test_bf16_rounding_is_used_by_its_own_kernel_only() -> None:
    given = {name: x.bfloat16().double() for name, x in sample(2, 40, 2, 1, 32).items()}
    same = [
        torch.equal(a, b)
        for a, b in zip(by_kernel(given), by_kernel(given, bf16=True), strict=True)
    ]
    assert same == [not USE_BF16] * 3


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_do_not_depend_on_the_number_of_threads(bf16: bool) -> None:
    given = sample(5, 130, 4, 2, 32)
    threads = torch.get_num_threads()
    shared = by_kernel(given, bf16=bf16)
    torch.set_num_threads(1)
    try:
        alone = by_kernel(given, bf16=bf16)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(shared, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("lengths", [[3, 90, 17], [90, 3, 33, 32, 1]])
def test_sequences_of_different_lengths_do_not_affect_each_other(
    lengths: list[int], bf16: bool
) -> None:
    """Buffers still hold data of a longer sequence when a shorter one follows."""
    Q, H, K, M = 4, 2, 32, sum(lengths)
    each = [sample(1, length, Q, H, K) for length in lengths]
    floats = []
    for given in each:
        out, logs = attention(given["q"], given["k"], given["v"])
        floats.append({n: x.float() for n, x in (*given.items(), ("out", out), ("logs", logs))})
    rows = {n: torch.cat([f[n][0] for f in floats]) for n in ("q", "grad", "out", "logs")}
    keys, values = (torch.cat([f[n][0] for f in floats], 1).contiguous() for n in ("k", "v"))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    dq, dk, dv = torch.empty(M, Q, K), torch.empty(M, H, K), torch.empty(M, H, K)
    attend_backward(
        rows["q"].data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rows["grad"].data_ptr(),
        rows["out"].data_ptr(),
        rows["logs"].data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        H * K * 4,
        starts.data_ptr(),
        starts.data_ptr(),
        len(lengths),
        M,
        max(lengths),
        Q,
        H,
        K,
        work=1 << 20,
        bf16=bf16,
    )
    alone_of = [by_kernel(given, bf16=bf16) for given in each]
    expected = [torch.cat(parts, 1)[0] for parts in zip(*alone_of, strict=True)]
    for found, alone in zip((dq, dk, dv), expected, strict=True):
        assert torch.equal(found, alone)


@pytest.mark.parametrize(("K", "bf16"), [(16, False), (32, True)])
def test_later_tokens_get_and_give_no_gradient(K: int, bf16: bool) -> None:
    given = sample(1, 60, 2, 1, K)
    given["grad"][:, 20:] = 0
    dq, dk, dv = by_kernel(given, bf16=bf16)
    assert not dq[:, 20:].any()
    assert not dk[:, 20:].any()
    assert not dv[:, 20:].any()
    given["k"][:, :, 20:] *= 3
    given["v"][:, :, 20:] += 1
    for again, before in zip(by_kernel(given, bf16=bf16), (dq, dk, dv), strict=True):
        assert torch.equal(again, before)


@pytest.mark.parametrize(("K", "bf16"), [(16, False), (32, True)])
def test_nan_in_a_gradient_propagates(K: int, bf16: bool) -> None:
    given = sample(1, 20, 2, 1, K)
    given["grad"][0, 10, 0, 3] = float("nan")
    dq, dk, dv = by_kernel(given, bf16=bf16)
    assert dq[0, 10, 0].isnan().all()
    assert dk[0, :11].isnan().any()
    assert dv[0, :11, 0, 3].isnan().all()


@pytest.mark.skipif(not USE_BF16 or USE_AMX, reason="the variable has no effect")
def test_gradients_without_avx512_bf16() -> None:
    """The tests above, in a process that must not use the kernel for bf16."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    subprocess.run(line, check=True, env={**os.environ, NO_BF16_BACKWARD: "1"})
