"""The rules of exact mode on this CPU: when do a token's bits not depend on the rest of the batch?

Prints, for matrix products and for attention, which values change when the same rows are computed
in batches of other sizes. `python bench/numerics.py [--dtype float32|bfloat16]`
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

from slipstream.models.attention import (
    as_context,
    attend,
    causal_mask,
    fold_queries,
    padded_keys,
    unfold_queries,
)

SHAPES = ((192, 576), (192, 1024), (512, 192), (768, 192), (192, 128), (2048, 512), (512, 2048))
ROWS = (*range(1, 34), 40, 48, 56, 64, 100, 128, 256, 500, 512, 1000, 1024)


def linear_rows(dtype: torch.dtype) -> None:
    """Print the row counts for which a row of x W^T differs from the same row among 2,048 rows."""
    for width, out in SHAPES:
        x = torch.randn(2048, width).to(dtype)
        w = torch.randn(out, width).to(dtype)
        reference = F.linear(x, w)
        unequal = [m for m in ROWS if not torch.equal(F.linear(x[:m].clone(), w), reference[:m])]
        print(f"linear {width} -> {out}: row counts that change bits: {unequal or 'none'}")


def attention_rows(dtype: torch.dtype) -> None:
    """Print how many values of one decoded token differ from those in a whole forward pass."""
    for heads, group, width in ((1, 4, 32), (2, 4, 32), (2, 2, 64), (4, 1, 16), (1, 4, 48)):
        B, T = 6, 512
        q = torch.randn(B, T, heads * group, width).to(dtype)
        k, v = torch.randn(2, B, heads, T, width).to(dtype)
        everyone = torch.arange(T).expand(B, T)
        mask = causal_mask(everyone, T, heads, group)
        whole = attend(fold_queries(q, heads), as_context(k.flatten(0, 1), v.flatten(0, 1)), mask)
        whole = unfold_queries(whole, T, heads, group).view(B, T, -1)
        differ = total = 0
        for position in (1, 5, 17, 60, 63, 64, 65, 100, 129, 200, 300, 400, 511):
            for rows in ([0], [1, 3], list(range(B))):
                keys = padded_keys(position + 1, dtype, q.device)
                one = fold_queries(q[rows, position : position + 1], heads)
                mask = causal_mask(torch.full((len(rows), 1), position), keys, heads, group)
                seen, values = (x[rows, :, :keys].flatten(0, 1) for x in (k, v))
                got = attend(one, as_context(seen, values), mask)
                got = unfold_queries(got, 1, heads, group)
                want = whole[rows, position]
                differ += int((got != want).sum())
                total += want.numel()
        print(f"attention {heads} heads x {group} x {width}: {differ} of {total} values differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[parser.parse_args().dtype]
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}")
    linear_rows(dtype)
    attention_rows(dtype)


if __name__ == "__main__":
    with torch.no_grad():
        main()
