"""Builds one self-contained HTML page of runs, with styles, script, plotting library and data.

Decides what the page contains; `assets/page.js` draws it. Called by the command line and by
`watch`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from slipstream import __version__
from slipstream.config.tree import leaves
from slipstream.errors import DataError
from slipstream.metrics.timeline import Process
from slipstream.report.charts import accuracy_chart, charts_of, number, steps_of
from slipstream.report.ledger import PARTS, gantt, ledger_of
from slipstream.report.read import Record, RunData, read_run

REPORT_FILE = "report.html"

MAX_RUNS = 8
"""Maximum number of runs on one page: more colors could not be told apart."""

MAX_SPANS = 400
"""Maximum number of spans that are drawn per run."""

_ASSETS = files("slipstream.report") / "assets"
_PLAN = re.compile(r"spec/plan_seconds/bs_(?P<size>\w+)/(?P<plan>.+)")
_SIZES = {"1": "1", "4": "2 to 4", "16": "5 to 16", "64": "17 to 64", "more": "65 and more"}
_LOST = {
    "rollout/num_dropped_groups/": "groups dropped: ",
    "training/num_failed_rewards/": "samples failed: ",
}
_SHARES = {
    "response/aborted_ratio": ("samples aborted", "samples"),
    "rollout_corr/rollout_is_veto_fraction": (
        "responses vetoed by the rollout correction",
        "trained",
    ),
    "rollout_corr/rollout_rs_seq_masked_fraction": (
        "responses with tokens that the rollout correction rejected",
        "trained",
    ),
}
"""Metrics that are a share of a step's samples: of all, or of the trained (not failed) ones."""
_BY_RULE = re.compile(r"rollout_corr/rollout_rs_(?P<rule>.+)_seq_masked_fraction")
_UNSCORED = re.compile(r"val-aux/(?P<source>.+)/num_failed")
_COUNTED = {
    "training/num_lone_samples": "samples dropped: all others of the group failed",
    "training/skipped_batch": "steps without an update: nothing to train on",
    "training/skipped_steps": "optimizer steps skipped: gradient not finite",
    "rollout/num_carried_over": "samples carried over to a later step (not lost)",
}


def write_report(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the page of the runs in `folders`. Returns notes on what could not be read.

    Raises DataError if a folder has no run, if there are no or too many folders, or if `output`
    cannot be written.
    """
    runs = read_runs(folders)
    text = page(payload(runs))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"the report cannot be written to {output} ({error}); set another --output"
        ) from error
    return [f"{run.name}: {note}" for run in runs for note in run.notes]


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return the runs of one page, each with a unique name. Raises DataError."""
    if not folders:
        raise DataError("no run folder is given; name one or more")
    if len(folders) > MAX_RUNS:
        raise DataError(f"{len(folders)} runs are too many for one page; give {MAX_RUNS} or fewer")
    names = _names(folders)
    return [read_run(folder, name=name) for folder, name in zip(folders, names, strict=True)]


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """Return the HTML page of `payload()`. With `live`, the page polls its server for new data."""
    # No text of a run may end the script element that contains the data.
    data = {**data, "made": round(time.time())}
    text = as_json(data).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(data["title"]),
        "STYLE": _style(),
        "PLOT": _asset("uPlot.iife.min.js"),
        "SCRIPT": _asset("page.js"),
        "LIVE": "true" if live else "false",
        "DATA": text,
    }
    return _filled(parts)


@functools.cache
def security_policy() -> str:
    """Return the Content-Security-Policy of a live page.

    It allows exactly the page's own scripts and styles, by their hashes, and requests to the
    page's server. So a text of a run can never run as a script.
    """
    parts = {
        "STYLE": _style(),
        "PLOT": _asset("uPlot.iife.min.js"),
        "SCRIPT": _asset("page.js"),
        "LIVE": "true",
        "DATA": "",
        "TITLE": "",
    }
    text = _filled(parts)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    return (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _style() -> str:
    return _asset("uPlot.min.css") + _asset("page.css")


def _filled(parts: dict[str, str]) -> str:
    # In one pass, because inserted text may look like a placeholder.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def as_json(data: dict[str, Any]) -> str:
    """Return compact, strict JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return all data of the page as JSON values."""
    return {
        "title": " · ".join(run.name for run in runs),
        "version": __version__,
        "runs": [_run(run) for run in runs],
        "charts": charts_of(runs),
        "parts": PARTS,
        "differences": _differences(runs),
    }


def _run(run: RunData) -> dict[str, Any]:
    ledger = ledger_of(run)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "notes": run.notes,
        "steps": steps_of(run),
        "tiles": _tiles(run),
        "ledger": None
        if ledger is None
        else {
            "wall": number(ledger.wall),
            "parts": {name: number(seconds) for name, seconds in ledger.parts.items()},
            "unexplained": number(ledger.unexplained),
        },
        "gantt": [[name, number(a), number(b)] for name, a, b in _longest(gantt(run.processes))],
        "lost": _lost(run.rl),
        "plans": _plans(run.steps),
        "lengths": run.lengths,
        "samples": [
            {"step": step, **sample} for step, rows in run.tokens.items() for sample in rows
        ],
        "processes": [_process(process) for process in run.processes],
        "environment": {key: str(value) for key, value in run.environment.items()},
        "config": yaml.safe_dump(run.config, sort_keys=False) if run.config else "",
    }


def _tiles(run: RunData) -> list[list[str]]:
    """Return `[label, value, explanation]` of the most important numbers."""
    steps, tiles = run.steps, list[list[str]]()
    last = steps[-1].data if steps else {}
    total = _planned_steps(run)
    if steps:
        done = f"{steps[-1].step:,}" + (f" of {total:,}" if total else "")
        tiles.append(["RL steps", done, "finished"])
    rewards = [r.data["critic/score/mean"] for r in steps if "critic/score/mean" in r.data]
    if rewards:
        few = max(1, len(rewards) // 10)
        first, now = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        tiles.append(
            ["Reward", f"{first:.3f} → {now:.3f}", f"mean of the first and last {few} steps"]
        )
    tiles += _accuracy_tiles(run)
    if steps:
        wall = sum(r.data["timing_s/step"] for r in steps)
        gen = sum(r.data.get("timing_s/gen", 0.0) for r in steps)
        tiles.append(["Rollouts", f"{100 * gen / wall:.0f} %", "of the time of RL steps"])
    speeds = [r.data[n] for r in steps for n in ("rollout/tokens_per_second",) if n in r.data]
    if speeds:
        tiles.append(["Rollout speed", f"{median(speeds):,.0f}", "tokens/s, median of the steps"])
    if "spec/accept_length" in last:
        tiles.append(
            ["Accepted length", f"{last['spec/accept_length']:.2f}", "tokens per verification"]
        )
    differing = [r.data.get("training/rollout_log_probs_differing") for r in steps]
    known = [value for value in differing if value is not None]
    if known:
        tiles.append(
            ["Log-probs that differ", f"{sum(known):,.0f}", "rollout against trainer, all steps"]
        )
    return tiles


def _accuracy_tiles(run: RunData) -> list[list[str]]:
    tiles = []
    chart = accuracy_chart([run])
    for line in chart["lines"] if chart["share"] else ():
        first, now, low, high = line["y"][0], line["y"][-1], line["low"][-1], line["high"][-1]
        if None in (first, now, low, high):
            continue
        note = f"{line['label']}; 95 %: {100 * low:.1f} to {100 * high:.1f}"
        tiles.append(["Accuracy", f"{100 * first:.1f} → {100 * now:.1f} %", note])
    return tiles


def _planned_steps(run: RunData) -> int | None:
    planned = run.trainer.get("total_training_steps")
    return planned if isinstance(planned, int) and planned > 0 else None


def _lost(steps: Sequence[Record]) -> list[list[Any]]:
    """Return `[description, count]` of everything that was dropped, failed or skipped."""
    found: dict[str, float] = {}
    for record in steps:
        samples = record.data.get("rollout/num_samples", 0.0)
        out = ("training/num_failed_rewards", "training/num_lone_samples")
        trained = samples - sum(record.data.get(name, 0.0) for name in out)
        for name, value in record.data.items():
            label, of = _loss(name)
            if label is not None and value:
                times = {"samples": samples, "trained": trained}.get(of, 1.0)
                found[label] = found.get(label, 0.0) + value * times
    counts = ((label, round(count)) for label, count in found.items())
    return [[label, count] for label, count in sorted(counts, key=lambda x: -x[1]) if count]


def _loss(metric: str) -> tuple[str | None, str]:
    """Return the label of the loss that `metric` measures (None if it measures no loss).

    Also returns its unit: a share of all "samples", a share of "trained" ones, or "" for a count.
    """
    if metric in _SHARES:
        return _SHARES[metric]
    if match := _BY_RULE.fullmatch(metric):
        label, of = _SHARES["rollout_corr/rollout_rs_seq_masked_fraction"]
        return f"{label}: {match['rule']}", of
    if match := _UNSCORED.fullmatch(metric):
        return f"validation samples failed: {match['source']}", ""
    for prefix, text in _LOST.items():
        if metric.startswith(prefix):
            return text + metric.removeprefix(prefix).replace("_", " "), ""
    return _COUNTED.get(metric), ""


def _plans(steps: Sequence[Record]) -> dict[str, Any] | None:
    """Return seconds of decoding by draft plan, for each class of running requests."""
    seconds: dict[str, dict[str, float]] = {}
    for record in steps:
        for name, value in record.data.items():
            if match := _PLAN.fullmatch(name):
                row = seconds.setdefault(_SIZES.get(match["size"], match["size"]), {})
                row[match["plan"]] = row.get(match["plan"], 0.0) + value
    if not seconds:
        return None
    plans = sorted({plan for row in seconds.values() for plan in row}, key=_plan_order)
    return {
        "plans": plans,
        "rows": [
            [size, [number(seconds[size].get(plan, 0.0)) for plan in plans]]
            for size in _SIZES.values()
            if size in seconds
        ],
    }


def _plan_order(plan: str) -> tuple[int, ...]:
    return (0,) if plan == "off" else (1, *map(int, re.findall(r"\d+", plan)))


def _longest(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return the `MAX_SPANS` longest spans; shorter ones would be invisible."""
    return sorted(spans, key=lambda span: span[1] - span[2])[:MAX_SPANS]


def _process(process: Process) -> list[Any]:
    """Return `[begin, seconds, status, command]`."""
    return [
        round(process.begin),
        number(process.seconds),
        process.status or "end not recorded",
        " ".join(map(str, process.facts.get("argv", []))),
    ]


def _differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return `[key, value of each run]` of the settings in which the runs differ."""
    if len(runs) < 2:
        return []
    found = [dict(leaves(run.config)) for run in runs]
    shown = [{k: json.dumps(v, default=str) for k, v in settings.items()} for settings in found]
    keys = list(dict.fromkeys(key for settings in shown for key in settings))
    rows = [[key, *(settings.get(key, "not set") for settings in shown)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({p[-length:] for p in parts}) < len(set(parts)):
        length += 1
    return ["/".join(p[-length:]) for p in parts]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
