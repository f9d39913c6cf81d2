"""Metrics of a step from the engine's counters: time, tokens, speculation."""

from __future__ import annotations

from slipstream.inference.protocol import BATCH_LIMITS, EngineStats, InferenceEngine

BATCH_NAMES = (*(f"bs_{limit}" for limit in BATCH_LIMITS), "bs_more")
"""Batch sizes are grouped in metrics; these are the upper limits of the groups."""

VERDICTS = ("new", "old", "wrong", "undecided")
"""Values of `inference.servers.check.Verdict`, which is not imported here without servers."""


class EngineWatch:
    """Differences of the engine's counters between calls."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._before = engine.stats()

    def skip(self) -> None:
        """Ignore everything since the last call: it belongs to no step."""
        self._before = self._engine.stats()

    def status(self) -> str:
        """One line about the engine's current work. Called from the display's thread."""
        now = self._engine.stats()
        if not now.running and not now.waiting:
            return "engine: idle"
        waiting = f", {now.waiting} waiting" if now.waiting else ""
        drafts = f", drafts {now.plan}" if now.plan_seconds else ""
        new = now.since(self._before)
        return f"engine: {now.running} running{waiting}{drafts}, {new.generated_tokens:,} tokens"

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, with the names of docs/metrics.md."""
        before, now = self._before, self._engine.stats()
        self._before = now
        times = time_metrics(before, now)
        return times | speculation_metrics(before, now) | server_metrics(before, now)


def time_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`timing_s/gen/*` between two readings, if the engine measures its time."""
    new = now.since(before)
    if new.decode_seconds <= 0:
        return {}
    parts = {"prefill": new.prefill_seconds, "decode": new.decode_seconds - new.draft_seconds}
    if new.draft_seconds > 0:
        parts["draft"] = new.propose_seconds
        parts["verify"] = new.draft_seconds - new.propose_seconds
    return {f"timing_s/gen/{name}": seconds for name, seconds in parts.items()}


def server_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`timing_s/sync/*` and `server/*` between two readings, if the engine has servers that were
    updated or compared with the trainer."""
    new = now.since(before)
    metrics = {f"timing_s/sync/{name}": seconds for name, seconds in new.update_seconds.items()}
    if new.server_checks:
        counts = {verdict: new.server_checks.get(verdict, 0) for verdict in VERDICTS}
        metrics |= {f"server/checks/{verdict}": float(n) for verdict, n in counts.items()}
        shown = {"share": new.server_share, "difference": new.server_difference}
        metrics |= {f"server/{name}": v for name, v in shown.items() if v is not None}
    return metrics


def speculation_metrics(before: EngineStats, now: EngineStats) -> dict[str, float]:
    """`spec/*` between two readings. Metrics of events that did not happen are left out."""
    metrics: dict[str, float] = {}
    new = now.since(before)
    if not new.plan_seconds and not new.verifications:
        return metrics  # the engine has no drafts
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
