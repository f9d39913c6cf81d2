"""The shares of a decode step: the model, sampling, and everything around them.

Wraps methods of an engine's runner with clocks; the engine is not changed. Used by `decode`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream.bench.contenders import Workload, requests
from slipstream.bench.record import Spread
from slipstream.inference.engine import Engine

PARTS = {"model": "decode", "choice": "choose"}
"""Part of a step -> the method of the runner that does it."""


def step_shares(
    engine: Engine, workload: Workload, *, temperature: float, rounds: int
) -> dict[str, Spread]:
    """Shares of the wall time of decode steps, one value per round, after a warm-up round.

    `share_outside` is the rest: scheduling and bookkeeping in Python. `outside_ms_per_step` is the
    same in milliseconds. Steps with prefill do not count.
    """
    clocks = dict.fromkeys((*PARTS, "step"), 0.0)
    runner = engine._runner
    kept = {part: getattr(runner, method) for part, method in PARTS.items()}
    found: dict[str, list[float]] = {f"share_{part}": [] for part in (*PARTS, "outside")}
    found["outside_ms_per_step"] = []
    try:
        for part, method in PARTS.items():
            setattr(runner, method, _timed(kept[part], clocks, part))
        for number in range(1 + rounds):
            for request in requests(workload, temperature):
                engine.add(request)
            engine.step()
            clocks.update(dict.fromkeys(clocks, 0.0))
            step, steps = _timed(engine.step, clocks, "step"), 0
            while engine.has_work():
                step()
                steps += 1
            if number == 0:
                continue
            outside = clocks["step"] - sum(clocks[part] for part in PARTS)
            for part in PARTS:
                found[f"share_{part}"].append(clocks[part] / clocks["step"])
            found["share_outside"].append(outside / clocks["step"])
            found["outside_ms_per_step"].append(1000 * outside / steps)
    finally:
        for method in PARTS.values():
            delattr(runner, method)
    return {name: Spread.of(values) for name, values in found.items()}


def _timed(work: Callable[..., Any], clocks: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            clocks[name] += time.perf_counter() - start

    return timed
