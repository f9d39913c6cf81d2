"""Simulated first rollouts of a new selector of draft plans, against plain decoding.

    python -m bench.simulated_rollouts [--seeds 6] [--rollouts 3] [--batch 1 4 8 16 32 64]

A rollout has as many requests as run at once, but at least eight, with responses of log-normal
lengths (median 48 tokens, at most 238), so the batch shrinks. Costs are about those of a policy of
135 million parameters on two CPU cores: 10 ms per step and 0.7 ms per token. The heads:

    useless   2 % of its drafts are accepted; 49,152 tokens in its LM head
    new       15 % of first drafts; 49,152 tokens
    fair      55 % of first drafts; 1,024 tokens
    good      88 % of first drafts; 1,024 tokens

Steps vary by 5 %, and one in a hundred takes five times as long. Prints the speed over plain
decoding of all rollouts together and of each one, as median of the seeds and the worst of them.
Unlike `bench.first_rollouts` this takes seconds, and depends on the selector alone.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.bench.flags import add_batches_flag, add_count_flag
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    StepRecord,
    StrategySelector,
)

PLANS = [DraftPlan.chain(depth) for depth in (1, 2, 3, 4, 5, 7)]
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Head:
    """Acceptance rates by depth, and milliseconds of a forward pass for one request."""

    rates: Sequence[float]
    milliseconds: float


HEADS = {
    "useless": Head([0.02] * 7, 3.0),
    "new": Head([0.15, *[0.1] * 6], 3.0),
    "fair": Head([0.55, 0.4, *[0.3] * 5], 0.6),
    "good": Head([0.88, 0.75, 0.65, 0.6, *[0.5] * 3], 0.6),
}


def rollout(
    selector: StrategySelector, running: int, head: Head, rng: random.Random
) -> tuple[float, float]:
    """Milliseconds of a rollout by plain decoding, and with the selector's plans. The selector sees
    noise and disturbed steps; the returned times have none."""
    plain = took = 0.0
    for _ in range(max(running, SAMPLES) // running):
        left = [round(48 * math.exp(0.6 * rng.gauss(0, 1))) for _ in range(running)]
        left = [min(max(length, 4), 238) for length in left]
        plain += sum(_policy(sum(length > step for length in left)) for step in range(max(left)))
        unseen, missed = selector.begin_rollout(running), 0
        while left:
            count = len(left)
            plan = OFF if unseen else selector.select(count)
            accepted = [_accepted(head, plan, most, rng) for most in left if plan != OFF]
            milliseconds = _policy(count * plan.verify_tokens)
            if plan != OFF:
                milliseconds += 0.4 + plan.steps * (head.milliseconds + 0.06 * count)
                milliseconds += 0.05 * missed * count
            took += milliseconds
            noise = math.exp(rng.gauss(0, 0.05)) * (5 if rng.random() < 0.01 else 1)
            if unseen:
                unseen -= 1
            else:
                record = StepRecord(
                    running=count,
                    plan=plan,
                    seconds=1e-3 * milliseconds * noise,
                    drafted=[plan.steps] * len(accepted),
                    accepted=accepted,
                    steady=plan == OFF or not missed,
                )
                selector.record(record)
            missed = missed + 1 if plan == OFF else 0
            new = accepted or [0] * count
            left = [n - 1 - more for n, more in zip(left, new, strict=True) if n > 1 + more]
    return plain, took


def _policy(tokens: int) -> float:
    return 10 + 0.7 * tokens


def _accepted(head: Head, plan: DraftPlan, most: int, rng: random.Random) -> int:
    """Accepted drafts of a request that generates at most `most` more tokens."""
    correct = 0
    while correct < min(plan.steps, most - 1) and rng.random() < head.rates[correct]:
        correct += 1
    return correct


def speeds(head: str, running: int, rollouts: int, seed: int) -> tuple[float, list[float]]:
    """Speed over plain decoding of the first rollouts of a new selector: of all together, and of
    each."""
    rng, selector = random.Random(seed), CostModelSelector(PLANS)
    times = [rollout(selector, running, HEADS[head], rng) for _ in range(rollouts)]
    return sum(p for p, _ in times) / sum(t for _, t in times), [p / t for p, t in times]


def main(given: argparse.Namespace) -> None:
    """Simulate and print."""
    for head in HEADS:
        for running in given.batch:
            found = [speeds(head, running, given.rollouts, seed) for seed in range(given.seeds)]
            cells = [[whole, *each] for whole, each in found]
            shown = [f"{median(x):.3f} (worst {min(x):.3f})" for x in zip(*cells, strict=True)]
            print(f"{head:<8} {running:>3} running: all {shown[0]}; each {', '.join(shown[1:])}")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_batches_flag(parser, (1, 4, 8, 16, 32, 64))
    add_count_flag(parser, "rollouts", 3)
    add_count_flag(parser, "seeds", 6)
    return parser.parse_args()


if __name__ == "__main__":
    main(_flags())
