"""Matrix products of few rows: `F.linear` against a weight laid out once (`models/linear.py`).

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

from slipstream.models.linear import PackedLinear

SHAPES = ((192, 1024), (512, 1024), (512, 3072), (1536, 512), (512, 8192))
ROWS = (4, 8, 32, 128)
ANY_ROWS = (*range(1, 34), 48, 60, 100, 128, 200, 256, 500, 512)


def microseconds(product: Callable[[Tensor], Tensor], x: Tensor, repeats: int = 100) -> float:
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
        linear = PackedLinear.of(weight)
        if linear.prepared is None:
            raise SystemExit("no weight is laid out on this machine: it has no x86 CPU")
        many = torch.randn(1024, width)
        reference = linear(many)
        unequal = sum(not torch.equal(linear(many[:m].clone()), reference[:m]) for m in ANY_ROWS)
        times = []
        for rows in ROWS:
            x = many[:rows].clone()
            plain = microseconds(partial(F.linear, weight=weight), x)
            times.append(f"{rows} rows {plain:.0f} / {microseconds(linear, x):.0f}")
        print(
            f"{width} -> {out}: F.linear / laid out, us: {', '.join(times)}; "
            f"{unequal} of {len(ANY_ROWS)} row counts change bits"
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
