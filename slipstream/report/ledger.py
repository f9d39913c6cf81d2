"""Splits the wall time of a run into measured parts and an unexplained rest.

    wall = start-up + set-up + SFT + draft head + [steps of RL, by stage] + validation + ... + rest

The wall time is the sum over processes of the time from start to end (`metrics.timeline`). Each
part is measured independently, so the rest is what no part covers. Two parts within an RL step are
remainders themselves: `engine idle` of generation, and `rest of the step`. A record counts for the
process that wrote it. If a process died and the next one resumed from an earlier step, phase time
of the dead process without a remaining record counts as `work lost to a stop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.metrics.timeline import Process, Span
from slipstream.metrics.timers import STEP_PARTS
from slipstream.report.read import Record, RunData

GEN_PARTS = {
    "prefill": "prefill",
    "decode": "decode, plain",
    "draft": "draft",
    "verify": "verify",
    "wait": "engine idle",
}
STAGES = {
    "gen": "generation",
    "tools": "waiting for tools",
    "reward": "reward",
    "adv": "advantages",
    "old_log_prob": "log-probs, policy",
    "ref": "log-probs, reference",
    "values": "values",
    "update_critic": "train critic",
    "update_actor": "train policy",
    "sync": "weight sync",
    "drafter": "train drafter",
    "other": "rest of the step",
}
PHASES = ("sft", "rl")
"""Spans that consist of steps."""

SPANS = {
    "setup": "set-up",
    "testing": "validation",
    "save_checkpoint": "checkpoints",
    "evaluate": "final evaluation",
    "compare": "comparison of decoding",
    "draft": "draft head before RL",
    "sft_control": "continued SFT",
    "close": "end of other processes",
}
STARTUP, SFT, DUMP = "start-up", "SFT", "writing rollouts"
LOST, REST = "work lost to a stop", "not measured"
PARTS = (
    *(STARTUP, SPANS["setup"], SFT, SPANS["draft"]),
    *GEN_PARTS.values(),
    *STAGES.values(),
    DUMP,
    *(name for span, name in SPANS.items() if span not in ("setup", "draft")),
    LOST,
)
"""All part names, in display order."""

_SHOWN = {**SPANS, "sft": SFT, "rl": "RL"}
_CLEAN_ENDS = ("finished", "interrupted")
"""Final states of a process that lost no work."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by part, in display order. The unexplained rest is last. They add up to `wall`."""

    wall: float
    parts: dict[str, float]

    @property
    def unexplained(self) -> float:
        """Share of the wall time that no part covers."""
        return abs(self.parts[REST]) / self.wall if self.wall else 0.0


def step_parts(record: Record) -> dict[str, float]:
    """Return seconds of an RL step by stage. They add up to `timing_s/step`.

    Generation is split further if the engine reports its own times (`timing_s/gen/*`).
    """
    data, parts = record.data, dict[str, float]()
    for name in (*STEP_PARTS, "other"):
        seconds = data.get(f"timing_s/{name}")
        if seconds is None:
            continue
        inner = {
            label: data[f"timing_s/gen/{part}"]
            for part, label in GEN_PARTS.items()
            if name == "gen" and f"timing_s/gen/{part}" in data
        }
        parts |= inner or {STAGES[name]: seconds}
    return parts


def record_parts(record: Record) -> dict[str, float]:
    """Return seconds of an SFT or RL step by part, and of dumping its rollouts."""
    if "sft/loss" in record.data:
        return {SFT: record.data.get("timing_s/step", 0.0)}
    dump = record.data.get("timing_s/dump_rollout_generations", 0.0)
    return step_parts(record) | {DUMP: dump}


def writer_of(record: Record, processes: Sequence[Process]) -> Process | None:
    """Return the process that wrote `record`.

    None if the record has no time, or is older than all processes.
    """
    if record.time is None:
        return None
    started = [process for process in processes if process.begin <= record.time]
    return started[-1] if started else None


def ledger_of(run: RunData) -> Ledger | None:
    """Return the ledger of all processes of a run; None if the run has no timeline."""
    if not run.processes:
        return None
    found: dict[str, float] = {}

    def add(name: str, seconds: float) -> None:
        found[name] = found.get(name, 0.0) + seconds

    for number, process in enumerate(run.processes):
        if process.spans:
            add(STARTUP, process.spans[0].begin - process.begin)
        for span in _leaves(process.spans):
            add(SPANS.get(span.name, span.name), span.seconds)
        recorded = 0.0
        for record in (*run.sft, *run.steps):
            if writer_of(record, run.processes) is process:
                for name, seconds in record_parts(record).items():
                    add(name, seconds)
                    recorded += seconds
        if number + 1 < len(run.processes) and process.status not in _CLEAN_ENDS:
            phases = sum(span.own for span in process.spans if span.name in PHASES)
            add(LOST, max(0.0, phases - recorded))
    wall = sum(process.seconds for process in run.processes)
    parts = {name: found.pop(name) for name in PARTS if found.get(name)}
    parts |= {name: seconds for name, seconds in found.items() if seconds}
    parts[REST] = wall - sum(parts.values())
    return Ledger(wall=wall, parts=parts)


def _leaves(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans that are one part as a whole: all except phases that consist of steps."""
    for span in spans:
        if span.name in PHASES:
            yield from _leaves(span.inner)
        else:
            yield span


def gantt(processes: Sequence[Process]) -> list[tuple[str, float, float]]:
    """Return (name, begin, end) of all spans, in seconds since the start of the first process.

    Spans that are a part of the ledger have the same name as there.
    """
    if not processes:
        return []
    zero = processes[0].begin
    rows: list[tuple[str, float, float]] = []

    def walk(spans: Sequence[Span]) -> None:
        for span in spans:
            begin = span.begin - zero
            rows.append((_SHOWN.get(span.name, span.name), begin, begin + span.seconds))
            walk(span.inner)

    for process in processes:
        walk(process.spans)
    return rows
