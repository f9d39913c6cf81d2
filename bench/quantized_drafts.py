"""Drafts by a quantized copy of a policy: speed of decoding, accepted drafts, and renewal.

    python -m bench.quantized_drafts --policy FOLDER [--batch 1 4] [--rounds 3]

The policy answers short questions at temperature 1, without drafts and with chains of several
lengths from copies of 4 and 8 bits. All engines generate the same tokens, or the benchmark fails.
Contenders are interleaved. Times are the fastest of the rounds, because other programs only make
them longer. Prints also the seconds to make a copy, as after a weight update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from bench.chat_requests import chat_prompts, flags_of, requests_for
from slipstream.bench.timing import alternate
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.quantized import QuantizedProposer
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import default_dtype
from slipstream.models.quantized import QuantizedPolicy
from slipstream.models.quantized_linear import Bits
from slipstream.types import SamplingParams

SUBJECTS = ("rivers", "chess", "bees", "trains")
TOKENS = 96
DEPTHS = (1, 2, 3, 4, 6)


def main(policy: Path, batches: Sequence[int], rounds: int) -> None:
    """Measure and print."""
    decoder = load_checkpoint(policy)
    asked = chat_prompts(policy, [f"Tell me about {subject}." for subject in SUBJECTS])
    for bits in get_args(Bits):
        _print_renewal(decoder, bits)
    settings = EngineSettings(
        dtype=default_dtype(decoder.device), max_num_seqs=64, max_model_len=512
    )
    # One engine for each number of bits, because each has its own copy of the policy.
    engines = {
        bits: Engine(decoder, settings, proposer=QuantizedProposer(bits, bits))
        for bits in get_args(Bits)
    }
    plans = {"no drafts": (engines[8], OFF)}
    for bits, engine in engines.items():
        for depth in DEPTHS:
            plans[f"{bits} bits, {depth} drafts"] = engine, DraftPlan.chain(depth)
    for batch in batches:
        _print_speeds(plans, asked, batch, rounds)


def _print_renewal(decoder: Decoder, bits: Bits) -> None:
    """Print size and time of a copy; the second one uses the memory of the first."""
    with torch.no_grad():
        packed = decoder.pack(default_dtype(decoder.device))
    made, seconds = QuantizedPolicy(bits, bits), list[float]()
    for _ in range(3):
        made.forget()
        started = time.perf_counter()
        made.renew(packed)
        seconds.append(time.perf_counter() - started)
    print(f"{bits} bits: {made.nbytes / 1e6:.0f} MB, made in {1e3 * min(seconds):.0f} ms")


def _print_speeds(
    plans: dict[str, tuple[Engine, DraftPlan]],
    asked: Sequence[list[int]],
    batch: int,
    rounds: int,
) -> None:
    expected: list[list[int]] = []
    counts: dict[str, tuple[int, int]] = {}

    def run(name: str, engine: Engine, plan: DraftPlan) -> None:
        engine.plan = plan
        before = engine.stats().decode_steps
        params = SamplingParams(temperature=1.0, max_tokens=TOKENS)
        found = [list(g.token_ids) for g in engine.run(requests_for(asked, batch, params))]
        expected.extend(found if not expected else ())
        if found != expected:
            raise SystemExit(f"{name} changed the tokens")
        counts[name] = sum(map(len, found)), engine.stats().decode_steps - before

    contenders = {name: partial(run, name, *plan) for name, plan in plans.items()}
    times = alternate(contenders, rounds=rounds)
    plain = 0.0
    for name in plans:
        seconds, (tokens, steps) = min(times[name].wall), counts[name]
        plain = plain or seconds
        print(
            f"batch {batch}, {name}: {tokens / seconds:.1f} tokens/s, x{plain / seconds:.2f}, "
            f"{1e3 * seconds / steps:.2f} ms a step, {tokens / batch / steps:.2f} tokens a step"
        )


if __name__ == "__main__":
    given = flags_of(__doc__, batches=(1, 4), rounds=3)
    main(given.policy, given.batch, given.rounds)
