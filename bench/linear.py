"""Matrix products of few and many rows: `F.linear` against the kernels in `models/linear.py`.

Prints the median time in microseconds, alternating between twelve weights as in a model, and the
number of row counts for which the bits of a row differ from those in a large batch.
`python bench/linear.py [--threads N]`
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.linear import PackedLinear

SHAPES = ((192, 1024), (512, 1024), (512, 3072), (1536, 512), (512, 8192))
ROWS = (1, 4, 8, 32, 128, 2048)
ANY_ROWS = (*range(1, 34), 48, 60, 100, 128, 200, 256, 500, 512)


def microseconds(product: Callable[[Tensor, int], object], x: Tensor, repeats: int) -> float:
    weights = itertools.cycle(range(12))
    for _ in range(12):
        product(x, next(weights))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, next(weights))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    threads = parser.parse_args().threads
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    for width, out in SHAPES:
        weights = [torch.randn(out, width) for _ in range(12)]
        linears = [PackedLinear.of(weight) for weight in weights]
        many = torch.randn(1024, width)
        reference = linears[0](many)
        unequal = sum(
            not torch.equal(linears[0](many[:m].clone()), reference[:m]) for m in ANY_ROWS
        )
        times = []
        for rows in ROWS:
            x = torch.randn(rows, width)
            repeats = 200 if rows <= 128 else 24
            plain = microseconds(lambda x, i: F.linear(x, weights[i]), x, repeats)  # noqa: B023
            ours = microseconds(lambda x, i: linears[i](x), x, repeats)  # noqa: B023
            times.append(f"{rows} rows {plain:.0f} / {ours:.0f}")
        print(
            f"{width} -> {out}: F.linear / kernel, us: {', '.join(times)}; "
            f"other bits for {unequal} of {len(ANY_ROWS)} row counts"
        )


if __name__ == "__main__":
    main()
