"""Why all work on tensors shares one thread: a second OpenMP team slows down the first.

Prints the median tokens per second of forward and backward passes of the quickstart's model: on the
main thread, on a worker thread that does everything, and on a worker thread after the main thread
has computed. `python bench/threads.py`
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from slipstream.bench.shapes import SHAPES, make_decoder
from slipstream.models.decoder import Decoder

B, T, STEPS = 16, 128, 10
CASES = ("main", "worker", "worker-after-main")


def make() -> Decoder:
    return make_decoder("quickstart", max_positions=T)


def tokens_per_second(decoder: Decoder) -> float:
    ids, positions = (
        torch.randint(0, SHAPES["quickstart"].vocab_size, (B, T)),
        torch.arange(T).expand(B, T),
    )
    seconds = []
    for _ in range(2 + STEPS):
        start = time.perf_counter()
        packed = decoder.pack(torch.float32)
        logits = packed.lm_head(packed.forward(ids, positions).final)
        logits.logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
        decoder.zero_grad()
        seconds.append(time.perf_counter() - start)
    return B * T / statistics.median(seconds[2:])


def measure(case: str) -> float:
    if case == "main":
        return tokens_per_second(make())
    with ThreadPoolExecutor(1) as worker:
        if case == "worker":
            return worker.submit(lambda: tokens_per_second(make())).result()
        return worker.submit(tokens_per_second, make()).result()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(measure(sys.argv[1]))
        sys.exit()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for case in CASES:
        # One process per run, because a team of OpenMP threads never ends.
        runs = [subprocess.check_output([sys.executable, __file__, case]) for _ in range(3)]
        print(f"{case:<18} {statistics.median(float(run) for run in runs):6.0f} tokens/s")
