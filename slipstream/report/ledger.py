"""Where the wall time of a run went: measured parts, and what none of them explains.

    wall = start-up + set-up + SFT + draft head + [steps of RL, by stage] + validation + ... + rest

The wall time is that from the start to the end of each process (`metrics.timeline`); the parts are
measured each by itself, so the rest is what was not. Within a step of RL two are what others leave:
`engine idle` of generation, and `rest of the step`. A record counts in the process that wrote it;
of a process that died, and after which another went on from an earlier step, the time of its phases
that no record is left of is `work lost to a stop`.
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
"""Spans that are made of steps."""

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
"""All that are known, in the order in which they are told."""

_SHOWN = {**SPANS, "sft": SFT, "rl": "RL"}
_BY_ITSELF = ("finished", "interrupted")
"""How a process ends that loses nothing."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by part, in order, with those that are not explained as the last; they add up to
    `wall`."""

    wall: float
    parts: dict[str, float]

    @property
    def unexplained(self) -> float:
        """Share of the wall time that no part was measured of."""
        return abs(self.parts[REST]) / self.wall if self.wall else 0.0


def step_parts(record: Record) -> dict[str, float]:
    """Seconds of an RL step by stage; of generation by what the engine did, where it says so.
    They add up to `timing_s/step`."""
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
    """Seconds of a step of SFT or RL, and of what is written after it."""
    if "sft/loss" in record.data:
        return {SFT: record.data.get("timing_s/step", 0.0)}
    dump = record.data.get("timing_s/dump_rollout_generations", 0.0)
    return step_parts(record) | {DUMP: dump}


def writer_of(record: Record, processes: Sequence[Process]) -> Process | None:
    """The process that wrote it; None where it does not say when, or was there before all."""
    if record.time is None:
        return None
    begun = [process for process in processes if process.begin <= record.time]
    return begun[-1] if begun else None


def ledger_of(run: RunData) -> Ledger | None:
    """Of all processes of a run; None where it has no timeline."""
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
        if number + 1 < len(run.processes) and process.status not in _BY_ITSELF:
            phases = sum(span.own for span in process.spans if span.name in PHASES)
            add(LOST, max(0.0, phases - recorded))
    wall = sum(process.seconds for process in run.processes)
    parts = {name: found.pop(name) for name in PARTS if found.get(name)}
    parts |= {name: seconds for name, seconds in found.items() if seconds}
    parts[REST] = wall - sum(parts.values())
    return Ledger(wall=wall, parts=parts)


def _leaves(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans whose whole time is one part: all but the phases that are made of steps."""
    for span in spans:
        if span.name in PHASES:
            yield from _leaves(span.inner)
        else:
            yield span


def gantt(processes: Sequence[Process]) -> list[tuple[str, float, float]]:
    """`(what, begin, end)` of all spans, in seconds since the first process began; parts of the
    time by the names that they have there."""
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
