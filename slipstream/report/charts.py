"""The charts of a report as JSON values: which metrics are drawn together, over which axis.

A chart has `id`, `title`, `unit`, `note`, `about` ("rl", "sft" or "draft": whose steps) and
`lines`. A line has a `label`, the index `run` of its run, points `x` (indices into the run's steps)
and `y`, and optionally an interval `low`, `high`. Knows nothing of how charts are drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.report.ledger import GEN_PARTS, STAGES, step_parts, writer_of
from slipstream.report.read import Record, RunData

DIGITS = 5
"""Significant digits of the numbers in a chart. More would not be visible on a screen."""

_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")
_DEPTH = re.compile(r"spec/acceptance_rate_(?P<k>\d+)")
_PART = re.compile(r"reward/(?P<part>.+)/mean")


@dataclass(frozen=True, slots=True)
class Spec:
    """A chart of named metrics. `of` maps metric name to label; `smooth`: the lines are noisy."""

    id: str
    title: str
    unit: str
    of: Mapping[str, str]
    section: str
    note: str = ""
    about: str = "rl"
    smooth: bool = False
    zero: bool = False
    share: bool = False


SPECS = (
    Spec(
        "reward", "Reward", "mean score of a step", {"critic/score/mean": "reward"}, "learning",
        "band: 95 % interval of the smoothed mean, estimated from the spread of the steps",
        smooth=True,
    ),
    Spec(
        "lengths", "Response length", "tokens",
        {
            "response_length/median": "median",
            "response_length/mean": "mean",
            "response_length/p90": "90 %",
            "response_length/max": "longest",
        },
        "lengths", smooth=True, zero=True,
    ),
    Spec(
        "clip", "Cut off at the length limit", "share of responses",
        {"response_length/clip_ratio": "cut off"}, "lengths", smooth=True, share=True,
    ),
    Spec(
        "tail", "Long tail", "longest over median, within a group",
        {"rollout/longest_over_median": "longest / median"}, "lengths", smooth=True,
    ),
    Spec(
        "tail_seconds", "Tail time", "seconds of generation with few running requests",
        {"rollout/tail_seconds": "tail", "timing_s/gen": "all of generation"}, "lengths",
        smooth=True, zero=True,
    ),
    Spec(
        "speed", "Rollout speed", "tokens/s",
        {"rollout/tokens_per_second": "generated tokens/s"}, "time", smooth=True, zero=True,
    ),
    Spec(
        "speed_by_size", "Decoding speed by running requests", "tokens/s",
        {
            f"spec/tokens_per_second/bs_{size}": label
            for size, label in {
                "1": "1", "4": "2 to 4", "16": "5 to 16", "64": "17 to 64", "more": "more",
            }.items()
        },
        "time", smooth=True, zero=True,
    ),
    Spec(
        "accept_length", "Accepted length", "tokens per verification",
        {
            "spec/accept_length": "in rollouts",
            "drafter/accept_length/before": "held out, head in use",
            "drafter/accept_length/after": "held out, newly trained",
        },
        "speculation", smooth=True,
    ),
    Spec(
        "drafting", "Use of drafts", "share of decoding time",
        {
            "spec/on_fraction": "decode steps with drafts",
            "spec/head_fraction": "drafts of the draft head",
            "spec/recess_fraction": "decode steps in backoff, or before a head is trained",
        },
        "speculation", share=True,
    ),
    Spec(
        "drafter_loss", "Draft head: loss", "", {"drafter/loss": "loss"}, "speculation",
    ),
    Spec(
        "entropy", "Entropy", "nats per token", {"actor/entropy": "policy"}, "stability",
        smooth=True,
    ),
    Spec(
        "kl", "KL", "nats per token",
        {
            "actor/ppo_kl": "old to new policy",
            "actor/kl_loss": "to the reference, in the loss",
            "actor/reward_kl_penalty": "to the reference, in the reward",
            "rollout_corr/kl": "rollout to trainer",
        },
        "stability", smooth=True,
    ),
    Spec(
        "drift", "Rollout-trainer mismatch", "difference of a sampled token's probability",
        {
            "training/rollout_probs_diff_mean": "mean",
            "training/rollout_probs_diff_max": "largest",
        },
        "stability", "0 in exact mode: engine and trainer compute the same bits",
    ),
    Spec(
        "differing", "Log-probs that differ", "tokens",
        {"training/rollout_log_probs_differing": "tokens"}, "stability", zero=True,
    ),
    Spec(
        "clipfrac", "Clipped ratios", "share of tokens",
        {"actor/pg_clipfrac": "above or below", "actor/pg_clipfrac_lower": "dual clip"},
        "stability", smooth=True, share=True,
    ),
    Spec(
        "grad_norm", "Gradient norm", "before clipping",
        {"actor/grad_norm": "policy", "critic/grad_norm": "critic"}, "stability", smooth=True,
    ),
    Spec("lr", "Learning rate", "", {"actor/lr": "policy", "critic/lr": "critic"}, "stability"),
    Spec(
        "staleness", "Staleness", "policy versions",
        {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest"}, "stability",
        zero=True,
    ),
    Spec(
        "values", "Critic", "explained share of the returns' variance",
        {"critic/vf_explained_var": "explained"}, "stability", smooth=True,
    ),
    Spec(
        "groups", "Groups without training signal", "groups per step",
        {
            "training/num_zero_variance_groups": "all scores equal",
            "rollout/num_dropped_groups": "dropped by a filter",
        },
        "failures", smooth=True, zero=True,
    ),
    Spec(
        "failed", "Failed samples", "samples per step",
        {"training/num_failed_rewards": "failed"}, "failures", zero=True,
    ),
    Spec(
        "sft_loss", "Supervised fine-tuning", "nats per target token", {"sft/loss": "loss"},
        "before", about="sft", smooth=True,
    ),
    Spec(
        "draft_loss", "Draft head before RL", "loss", {"draft/loss": "loss"}, "before",
        about="draft", smooth=True,
    ),
)  # fmt: skip


def charts_of(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return all charts for which the runs have data, in the order of `SPECS`.

    They include the charts of metric families: accuracy by source, acceptance by depth, seconds by
    stage.
    """
    charts = [_chart(spec, runs) for spec in SPECS]
    charts.insert(1, accuracy_chart(runs))
    charts.insert(2, _parts(runs))
    charts.append(_depths(runs))
    charts.append(_seconds(runs))
    return [chart for chart in charts if chart["lines"]]


def steps_of(run: RunData) -> dict[str, dict[str, list[float | None]]]:
    """Return the possible x axes, by kind of steps ("rl", "sft", "draft").

    The axes are `step`, `minutes` of run time, and `tokens` trained on.
    """
    return {"rl": _axes(run, run.rl), "sft": _axes(run, run.sft), "draft": _axes(run, run.draft)}


def number(value: float) -> float | None:
    """Round `value` to `DIGITS`. Returns None for NaN and infinity, which JSON cannot represent."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def _axes(run: RunData, records: Sequence[Record]) -> dict[str, list[float | None]]:
    tokens, total = list[float | None](), 0.0
    for record in records:
        total += record.data.get("perf/total_num_tokens", record.data.get("sft/tokens", 0.0))
        tokens.append(total)
    return {
        "step": [float(record.step) for record in records],
        "minutes": _minutes(run, records),
        "tokens": tokens if total else [],
    }


def _minutes(run: RunData, records: Sequence[Record]) -> list[float | None]:
    """Return minutes of process run time; time between processes is left out.

    Empty if the time of any record is unknown.
    """
    out: list[float | None] = []
    for record in records:
        writer = writer_of(record, run.processes)
        if writer is None or record.time is None:
            return []
        before = sum(p.seconds for p in run.processes if p.begin < writer.begin)
        out.append(round((before + record.time - writer.begin) / 60, 4))
    return out


def _value(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.data.get(name)


def _records(run: RunData, about: str) -> list[Record]:
    return {"rl": run.rl, "sft": run.sft, "draft": run.draft}[about]


def _line(
    runs: Sequence[RunData],
    index: int,
    label: str,
    about: str,
    value: Callable[[Record], float | None],
    *,
    low: Callable[[Record], float | None] | None = None,
    high: Callable[[Record], float | None] | None = None,
) -> dict[str, Any] | None:
    """Return one run's line, or None if it has no points."""
    line: dict[str, Any] = {"label": label, "run": index, "x": [], "y": []}
    if low is not None:
        line |= {"low": [], "high": []}
    for place, record in enumerate(_records(runs[index], about)):
        found = value(record)
        if found is None:
            continue
        line["x"].append(place)
        line["y"].append(number(found))
        if low is not None and high is not None:
            lower, upper = low(record), high(record)
            line["low"].append(number(found if lower is None else lower))
            line["high"].append(number(found if upper is None else upper))
    return line if line["x"] else None


def _chart(spec: Spec, runs: Sequence[RunData]) -> dict[str, Any]:
    lines = [
        _line(runs, index, label, spec.about, _value(name))
        for index in range(len(runs))
        for name, label in spec.of.items()
    ]
    return {
        "id": spec.id,
        "title": spec.title,
        "unit": spec.unit,
        "note": spec.note,
        "section": spec.section,
        "about": spec.about,
        "smooth": spec.smooth,
        "zero": spec.zero,
        "share": spec.share,
        "lines": [line for line in lines if line is not None],
    }


def _named(
    id: str, title: str, unit: str, section: str, *, note: str = "", share: bool = False
) -> dict[str, Any]:
    return _chart(Spec(id, title, unit, {}, section, note, share=share), ())


def accuracy_chart(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the chart of held-out accuracy by data source, with intervals."""
    chart = _named(
        "accuracy", "Held-out accuracy", "share of right answers", "learning",
        note="band: 95 % Wilson interval, one trial per prompt", share=True,
    )  # fmt: skip
    for index, run in enumerate(runs):
        for name, source, n in _validated(run):
            aux = f"val-aux/{source}/acc/mean@{n}"
            line = _line(
                runs, index, source if n == "1" else f"{source}, mean of {n}", "rl",
                _value(name),
                low=_value(f"{aux}/ci_low"),
                high=_value(f"{aux}/ci_high"),
            )  # fmt: skip
            if line is not None:
                chart["lines"].append(line)
    values = [y for line in chart["lines"] for y in line["y"] if y is not None]
    chart["share"] = all(0 <= y <= 1 for y in values)
    return chart


def _validated(run: RunData) -> list[tuple[str, str, str]]:
    names = {name for record in run.rl for name in record.data if name.startswith("val-core/")}
    matches = [(name, _ACCURACY.fullmatch(name)) for name in sorted(names)]
    return [(name, match["source"], match["n"]) for name, match in matches if match]


def _parts(runs: Sequence[RunData]) -> dict[str, Any]:
    chart = _named("parts", "Parts of the reward", "mean of a step", "learning")
    chart["smooth"] = True
    return _family(chart, runs, _PART, lambda match: match["part"])


def _depths(runs: Sequence[RunData]) -> dict[str, Any]:
    chart = _named(
        "depths", "Acceptance by depth", "share of verifications", "speculation",
        note="of drafts with k or more tokens, the share with the first k accepted", share=True,
    )  # fmt: skip
    chart["smooth"] = True
    return _family(chart, runs, _DEPTH, lambda match: f"depth {match['k']}")


def _family(
    chart: dict[str, Any],
    runs: Sequence[RunData],
    pattern: re.Pattern[str],
    label: Callable[[re.Match[str]], str],
) -> dict[str, Any]:
    for index, run in enumerate(runs):
        names = {name for record in run.steps for name in record.data}
        found = [match for name in names if (match := pattern.fullmatch(name))]
        for match in sorted(found, key=lambda m: (len(m[0]), m[0])):
            line = _line(
                runs, index, label(match), "rl",
                _value(match[0]),
            )  # fmt: skip
            if line is not None:
                chart["lines"].append(line)
    return chart


def _seconds(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the stacked chart of seconds per step by stage, for the first run only."""
    chart = _named("seconds", "A step's time", "seconds, by stage", "time")
    chart["stacked"] = True
    if not runs:
        return chart
    parts = [step_parts(record) for record in runs[0].rl]
    for name in (*GEN_PARTS.values(), *STAGES.values()):
        if any(part.get(name) for part in parts):
            place = [i for i, part in enumerate(parts) if part]
            values = [number(max(0.0, parts[i].get(name, 0.0))) for i in place]
            chart["lines"].append({"label": name, "run": 0, "x": place, "y": values})
    return chart
