"""What an engine did in a step, and what of it speculation did, from its counters."""

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

    def status(self) -> str:
        """What it is doing now, in a line; asked from a display's thread."""
        now = self._engine.stats()
        if not now.running and not now.waiting:
            return "engine: idle"
        waiting = f", {now.waiting} waiting" if now.waiting else ""
        drafts = f", drafts {now.plan}" if now.plan_seconds else ""
        new = now.since(self._before)
        return f"engine: {now.running} running{waiting}{drafts}, {new.generated_tokens:,} tokens"

    def metrics(self) -> dict[str, float]:
        """Of what has happened since the last call, in the names of docs/metrics.md."""
        before, now = self._before, self._engine.stats()
        self._before = now
        return time_metrics(before, now) | speculation_metrics(before, now)


def time_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`timing_s/gen/*` between two readings, of an engine that measures itself."""
    new = now.since(before)
    if new.decode_seconds <= 0:
        return {}
    parts = {"prefill": new.prefill_seconds, "decode": new.decode_seconds - new.draft_seconds}
    if new.draft_seconds > 0:
        parts["draft"] = new.propose_seconds
        parts["verify"] = new.draft_seconds - new.propose_seconds
    return {f"timing_s/gen/{name}": seconds for name, seconds in parts.items()}


def speculation_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`spec/*` between two readings; nothing about what did not happen between them."""
    metrics: dict[str, float] = {}
    new = now.since(before)
    if not new.plan_seconds:
        return metrics  # of an engine that nobody drafts for
    if new.decode_seconds > 0:
        metrics["spec/on_fraction"] = new.on_fraction
        metrics["spec/recess_fraction"] = new.recess_steps / new.decode_steps
    if new.verifications:
        metrics["spec/accept_length"] = new.accept_length
    if new.draft_steps:
        metrics["spec/head_fraction"] = new.head_fraction
        metrics["spec/plan"] = new.draft_depth / new.draft_steps
    depths = zip(new.offered_depths, new.accepted_depths, strict=True)
    for depth, (offered, accepted) in enumerate(depths, 1):
        if offered:
            metrics[f"spec/acceptance_rate_{depth}"] = accepted / offered
    for name, seconds, tokens in zip(BATCH_NAMES, new.batch_seconds, new.batch_tokens, strict=True):
        if seconds > 0:
            metrics[f"spec/tokens_per_second/{name}"] = tokens / seconds
    for (size, plan), seconds in sorted(new.plan_seconds.items()):
        metrics[f"spec/plan_seconds/{BATCH_NAMES[size]}/{plan}"] = seconds
    return metrics
