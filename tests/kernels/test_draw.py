"""The kernel's noise equals that of `sampling.noise`.

`tests/sampling/test_choose.py` tests the choice of tokens.
"""

from __future__ import annotations

import torch

from slipstream.kernels.draw import draw
from slipstream.sampling.noise import gumbel_noise


def test_the_noise_equals_the_sampling_modules_at_every_position() -> None:
    # With equal scores the noise alone decides.
    N, V = 300, 77
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**31), 2**31 - 1, (N, 2), generator=generator).to(torch.int32)
    positions = torch.randint(0, 100_000, (N,), generator=generator)
    scores, tokens = torch.zeros(N, V), torch.empty(N, dtype=torch.int64)
    heat = torch.ones(N)
    draw(
        scores.data_ptr(),
        V,
        keys.data_ptr(),
        positions.data_ptr(),
        heat.data_ptr(),
        0,
        0,
        tokens.data_ptr(),
        N,
        V,
    )
    assert torch.equal(tokens, gumbel_noise(keys, positions, V).argmax(-1))
