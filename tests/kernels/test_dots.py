"""Dot products of one vector with several others."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.dots import dots


def products(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(rows),), torch.nan)
    dots(x.data_ptr(), rows.data_ptr(), len(x), len(rows), out.data_ptr())
    return out


@pytest.mark.parametrize("n", [1, 16, 40, 48, 100])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 12])
def test_dots_match_a_matrix_vector_product(n: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x, rows = torch.randn(n, generator=generator), torch.randn(count, n, generator=generator)
    exact = (rows.double() @ x.double()).float()
    torch.testing.assert_close(products(x, rows), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [16, 32, 48, 64, 72, 128])
def test_a_dot_product_does_not_depend_on_the_number_of_vectors(n: int) -> None:
    """Attention on a tree path multiplies keys one by one, other attention four at a time."""
    generator = torch.Generator().manual_seed(n)
    x, rows = torch.randn(n, generator=generator), torch.randn(11, n, generator=generator)
    whole = products(x, rows)
    for begin in range(11):
        for end in range(begin + 1, 12):
            assert torch.equal(products(x, rows[begin:end].contiguous()), whole[begin:end])


def test_lanes_are_added_in_the_documented_order() -> None:
    """Each lane sums every 16th product by fused multiply-adds; lanes are added by halves."""
    generator = torch.Generator().manual_seed(0)
    x, row = torch.randn(16, generator=generator), torch.randn(16, generator=generator)
    parts = list(x * row)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    assert float(products(x, row[None])) == float(parts[0])
