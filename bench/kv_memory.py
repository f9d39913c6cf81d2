"""Memory for keys and values of a long-tailed batch.

    python -m bench.kv_memory --policy FOLDER [--requests 64] [--longest 8192] [--median 256]

All requests run at once. The responses but one have lengths from half the median to one and a half
times the median. The other one continues a long response, and ends with `--longest` tokens after
all others. The benchmark prints the most bytes that the engine allocates for keys and values,
divided by the most bytes of the tokens that requests hold at one time, and fails above 1.3. It also
prints the bytes of a rectangle, rows times the longest context, at the moment when that is largest.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.chat_requests import chat_prompts, requests_for
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.metrics.resident import resident_bytes
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import default_dtype
from slipstream.types import SamplingParams

_MOST = 1.3
_MB = 1e6


def main(folder: Path, count: int, longest: int, median: int) -> None:
    """Measure and print. Raises SystemExit above the limit."""
    policy = load_checkpoint(folder)
    (prompt,) = chat_prompts(folder, ["Write a long story about a river."])
    lengths = [median // 2 + median * i // max(1, count - 2) for i in range(count - 1)]
    params = SamplingParams(temperature=1.0, max_tokens=2 * median, ignore_eos=True)
    *short, long = requests_for([prompt], count, params)
    asked = [
        replace(request, params=replace(params, max_tokens=length))
        for request, length in zip(short, lengths, strict=True)
    ]
    prior = longest - len(prompt) - 2 * median
    if prior < 0:
        raise SystemExit(f"--longest must be at least {len(prompt) + 2 * median}")
    asked.append(replace(long, prior_ids=tuple(prompt[i % len(prompt)] for i in range(prior))))
    settings = EngineSettings(
        dtype=default_dtype(policy.device), max_model_len=longest, max_num_seqs=count
    )
    engine = Engine(policy, settings)
    before = resident_bytes()
    for request in asked:
        engine.add(request)
    used = allocated = rectangle = resident = 0
    while engine.has_work():
        engine.step()
        running = [request.length for request in engine._scheduler.running]
        used = max(used, sum(running))
        rectangle = max(rectangle, len(running) * max(running, default=0))
        allocated = max(allocated, engine.stats().kv_bytes)
        resident = max(resident, resident_bytes() - before)
    slot = engine._scheduler.store.slot_bytes
    print(f"{count} requests: responses of {lengths[0]} to {lengths[-1]} tokens, one of {longest}")
    print(f"tokens held, at most   {used} = {used * slot / _MB:.0f} MB")
    print(f"allocated, at most     {allocated / _MB:.0f} MB, {allocated / (used * slot):.2f}x")
    print(f"rectangle, at most     {rectangle * slot / _MB:.0f} MB")
    print(f"resident memory grew   {resident / _MB:.0f} MB (with activations)")
    if allocated > _MOST * used * slot:
        raise SystemExit(f"more than {_MOST}x of the bytes held")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--median", type=int, default=256)
    given = parser.parse_args()
    main(given.policy, given.requests, given.longest, given.median)
