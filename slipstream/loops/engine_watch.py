"""What speculation did in a step, from an engine's counters."""

from __future__ import annotations

from slipstream.inference.protocol import BATCH_LIMITS, EngineStats, InferenceEngine

BATCH_NAMES = (*(f"bs_{limit}" for limit in BATCH_LIMITS), "bs_more")
"""Classes of batch size in metrics, by their upper ends."""


class EngineWatch:
    """Differences of counters between calls."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._before = engine.stats()

    def skip(self) -> None:
        """Leave out what has happened since the last call: it belongs to no step."""
        self._before = self._engine.stats()

    def metrics(self) -> dict[str, float]:
        """Of what has happened since the last call, in the names of docs/metrics.md."""
        before, now = self._before, self._engine.stats()
        self._before = now
        return speculation_metrics(before, now)


def speculation_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`spec/*` between two readings; nothing about what did not happen between them."""
    metrics: dict[str, float] = {}
    new = now.since(before)
    if new.decode_seconds > 0:
        metrics["spec/on_fraction"] = new.on_fraction
        metrics["spec/recess_fraction"] = new.recess_steps / new.decode_steps
    if new.verifications:
        metrics["spec/accept_length"] = new.accept_length
    if new.draft_steps:
        metrics["spec/head_fraction"] = new.head_fraction
        metrics["spec/plan"] = new.draft_depth / new.draft_steps
    for name, seconds, tokens in zip(BATCH_NAMES, new.batch_seconds, new.batch_tokens, strict=True):
        if seconds > 0:
            metrics[f"spec/tokens_per_second/{name}"] = tokens / seconds
    return metrics
