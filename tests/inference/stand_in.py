"""A replacement for CUDA graphs on a CPU.

Like a CUDA graph, torch's tracer records operations with fixed shapes and addresses, and none of
the Python code around them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.inference.engine.recorder import Recorded

MIB = 1 << 20
"""The memory in bytes that `trace` reports for each recording."""


def trace(compute: Callable[[], tuple[Tensor, ...]]) -> Recorded:
    """Record a computation; a `Recorder`."""
    recorded = make_fx(compute)()
    results = compute()

    def replay() -> None:
        for result, again in zip(results, recorded(), strict=True):
            result.copy_(again)

    return Recorded(results, replay, MIB)
