"""Memory over many small requests through one engine: resident bytes after every tenth of them.

A leak shows as a line that rises. Head and history draft at every step, and prefix caching and the
asynchronous protocol are on.
`python bench/requests.py [count]`
"""

from __future__ import annotations

import gc
import random
import sys
import time

import anyio
import torch

from slipstream.bench.shapes import SHAPES, make_decoder
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.report import ReportedSelector
from slipstream.inference.speculation.selector import PredefinedSelector
from slipstream.inference.speculation.union import UnionProposer
from slipstream.metrics.resident import resident_bytes
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

SHAPE = "tiny"
PLAN = DraftPlan.chain(2)


def small_request(index: int, rng: random.Random) -> GenerateRequest:
    prompt = tuple(rng.randrange(SHAPES[SHAPE].vocab_size) for _ in range(rng.randrange(4, 60)))
    return GenerateRequest(
        request_id=str(index),
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True),
        key=NoiseKey(seed=0, uid=str(index)),
    )


async def run(engine: EmbeddedEngine, count: int) -> None:
    rng = random.Random(0)
    first = 0
    for part in range(10):
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for index in range(part * count // 10, (part + 1) * count // 10):
                tasks.start_soon(engine.generate, small_request(index, rng))
        gc.collect()
        now = resident_bytes()
        # The first tenth warms up.
        first = now if part <= 1 else first
        seconds = time.perf_counter() - started
        print(
            f"{(part + 1) * count // 10:6d} requests  {now / 1e6:7.1f} MB resident"
            f"  {100 * now / first - 100:+6.2f} %  {engine.stats().kv_bytes / 1e6:6.1f} MB of keys"
            f" and values  {len(gc.get_objects())} objects  {engine.stats().draft_steps:6d} steps"
            f" with drafts  {seconds:5.1f} s"
        )


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) == 2 else 10_000
    settings = EngineSettings(
        max_model_len=96, dtype=torch.float32, kv_budget_bytes=16 << 20, prefix_caching=True
    )
    policy = make_decoder(SHAPE, max_positions=96)
    head = DraftHead(policy.config)
    head.init_weights(seed=0)
    engine = EmbeddedEngine(
        policy,
        settings,
        proposer=UnionProposer(
            EagleProposer(head, dtype=torch.float32), HistoryProposer(max_tokens=1 << 12)
        ),
        selector=ReportedSelector(PredefinedSelector(PLAN), notify=print),
    )
    anyio.run(run, engine, count)
    engine.close()
