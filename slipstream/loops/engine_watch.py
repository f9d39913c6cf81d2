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
    decoding = now.decode_seconds - before.decode_seconds
    if decoding > 0:
        metrics["spec/on_fraction"] = (now.draft_seconds - before.draft_seconds) / decoding
    verifications = now.verifications - before.verifications
    if verifications:
        accepted = now.accepted_tokens - before.accepted_tokens
        metrics["spec/accept_length"] = 1 + accepted / verifications
    steps = now.draft_steps - before.draft_steps
    if steps:
        metrics["spec/plan"] = (now.draft_depth - before.draft_depth) / steps
    for i, name in enumerate(BATCH_NAMES):
        seconds = now.batch_seconds[i] - before.batch_seconds[i]
        if seconds > 0:
            tokens = now.batch_tokens[i] - before.batch_tokens[i]
            metrics[f"spec/tokens_per_second/{name}"] = tokens / seconds
    return metrics
