"""Matrix products of few rows: `F.linear` against the two ways of `models/linear.py`, a weight laid
out once and a batch of two halves.

Prints microseconds (median), and for how many row counts a row's bits differ from the same row in a
large batch. `python bench/linear.py [--threads N]`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.linear import PackedLinear, PackedPair, worth_preparing
from slipstream.models.numerics import ROW_MULTIPLE

SHAPES = ((192, 1024), (512, 1024), (512, 3072), (1536, 512), (512, 8192))
ROWS = (4, 8, 32, 128)
ANY_ROWS = (*range(1, 34), 48, 60, 100, 128, 200, 256, 500, 512)


def microseconds(product: Callable[[Tensor], object], x: Tensor, repeats: int = 100) -> float:
    for _ in range(5):
        product(x)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    threads = parser.parse_args().threads
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    for width, out in SHAPES:
        weight = torch.randn(out, width)
        prepared = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        linear = PackedLinear(weight, None, prepared, weight.t())
        plain = PackedLinear(weight, None, None, weight.t())
        pair = PackedPair(plain, weight.view(2, -1, width).transpose(1, 2))
        many = torch.randn(1024, width)
        reference, (halves, _) = linear(many), pair(many)
        unequal = sum(not torch.equal(linear(many[:m].clone()), reference[:m]) for m in ANY_ROWS)
        unequal_pair = sum(
            not torch.equal(pair(many[:m].clone())[0], halves[:m])
            for m in ANY_ROWS
            if m % ROW_MULTIPLE == 0
        )
        times = []
        for rows in ROWS:
            x = many[:rows].clone()
            each = (partial(F.linear, weight=weight), linear, pair)
            times.append(f"{rows} rows " + " / ".join(f"{microseconds(p, x):.0f}" for p in each))
        print(
            f"{width} -> {out}: F.linear / laid out / two halves, us: {', '.join(times)}; "
            f"laid out: {unequal} of {len(ANY_ROWS)} row counts change bits, "
            f"halves: {unequal_pair} of the multiples of {ROW_MULTIPLE}; "
            f"used: {'laid out' if worth_preparing(weight) else 'plain, or halves for a pair'}"
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
