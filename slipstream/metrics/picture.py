"""Plots a run as one PNG: reward, accuracy, response lengths, accepted length of drafts, SFT loss.

Reads only `metrics.jsonl` files. Called by the loops at the end of a run, and by the report
command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import DataError
from slipstream.metrics.loggers import read_jsonl

_BLUE, _ORANGE, _GREEN, _RED = "#2563a8", "#d9730d", "#2f855a", "#b83280"
INK, MUTED, _GRID = "#24292f", "#6b7280", "#e5e7eb"
_COLORS = (_BLUE, _ORANGE, _GREEN, _RED)
_REWARD = "critic/score/mean"
_SFT = "sft/loss"
_LENGTHS = {
    "median": ("response_length/median", _BLUE),
    "90 %": ("response_length/p90", _ORANGE),
    "longest": ("response_length/max", _RED),
}
_DRAFTS = {
    "in rollouts": ("spec/accept_length", _BLUE),
    "held out, head in use": ("drafter/accept_length/before", _ORANGE),
    "held out, trained": ("drafter/accept_length/after", _GREEN),
}
_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")

Points = list[tuple[int, float]]


@dataclass(slots=True)
class _PlottedRun:
    """The curves of one plot, as (step, value) sorted by step."""

    reward: Points = field(default_factory=list)
    lengths: dict[str, Points] = field(default_factory=dict)
    drafts: dict[str, Points] = field(default_factory=dict)
    sft_loss: Points = field(default_factory=list)
    accuracy: dict[str, list[tuple[int, float, float, float]]] = field(default_factory=dict)


def plot_run(
    metrics_jsonl: Path | Sequence[Path],
    out: Path,
    summary: Mapping[str, object] | None = None,
    *,
    title: str = "Slipstream run",
) -> Path:
    """Draw the PNG `out` from one or more metrics files (one per phase). Returns `out`.

    Panels without data are omitted. Validation results are drawn if their file has RL steps.
    Results of an SFT file are drawn only if no file has RL steps. `summary` has short facts that
    are printed under the title, in order. Raises DataError if there is nothing to draw.
    """
    paths = [metrics_jsonl] if isinstance(metrics_jsonl, Path) else list(metrics_jsonl)
    run = _read(paths)
    panels = [
        panel
        for panel, data in (
            (_draw_reward, run.reward),
            (_draw_drafts, run.drafts),
            (_draw_accuracy, run.accuracy),
            (_draw_lengths, run.lengths),
            (_draw_sft, run.sft_loss),
        )
        if data
    ]
    if not panels:
        raise DataError(
            f"nothing to draw in {', '.join(map(str, paths))}: no {_REWARD}, no {_SFT}, no "
            "val-core/*/acc; give the metrics files of a run that has finished at least one step"
        )
    # Imported late, because most programs that import this package never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # If the number of panels is odd, the last one spans a whole row.
    wide = len(panels) - 1 if columns == 2 and len(panels) % 2 else None
    head = 1.25 if summary else 0.95
    figure = Figure(
        figsize=(5.6 * columns + 0.3, 3.5 * rows + head - 0.25), dpi=150, facecolor="white"
    )
    FigureCanvasAgg(figure)
    height = figure.get_figheight()
    grid = figure.add_gridspec(
        rows, columns, left=0.62 / figure.get_figwidth(), right=1 - 0.3 / figure.get_figwidth(),
        bottom=0.6 / height, top=1 - head / height, hspace=0.48, wspace=0.2,
    )  # fmt: skip
    for i, draw in enumerate(panels):
        row = i // columns
        spot = grid[row, :] if i == wide else grid[row, i % columns]
        axes = figure.add_subplot(spot)
        _style(axes)
        draw(axes, run)
    left = 0.3 / figure.get_figwidth()
    figure.text(left, 1 - 0.2 / height, title, fontsize=15, fontweight="bold", color=INK, va="top")
    if summary:
        facts = "   ·   ".join(f"{key}: {_fact(value)}" for key, value in summary.items())
        figure.text(left, 1 - 0.55 / height, facts, fontsize=9.5, color=MUTED, va="top")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", metadata={"Software": None})
    return out


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centered moving mean over `window` (odd) values; shorter at both ends."""
    reach = window // 2
    parts = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _read(paths: Sequence[Path]) -> _PlottedRun:
    run = _PlottedRun()
    records = {path: read_jsonl(path) for path in paths}
    has_rl = any(_REWARD in data for lines in records.values() for _, data in lines)
    for lines in records.values():
        of_rl = any(_REWARD in data for _, data in lines)
        of_sft = any(_SFT in data for _, data in lines)
        for step, data in sorted(lines, key=lambda line: line[0]):
            if _REWARD in data:
                run.reward.append((step, data[_REWARD]))
                for found, names in ((run.lengths, _LENGTHS), (run.drafts, _DRAFTS)):
                    for name, (key, _) in names.items():
                        if key in data:
                            found.setdefault(name, []).append((step, data[key]))
            if _SFT in data:
                run.sft_loss.append((step, data[_SFT]))
            if of_rl or not (has_rl and of_sft):
                _read_accuracy(run, step, data)
    return run


def _read_accuracy(run: _PlottedRun, step: int, data: Mapping[str, float]) -> None:
    for name, value in data.items():
        if match := _ACCURACY.fullmatch(name):
            bounds = f"val-aux/{match['source']}/acc/mean@{match['n']}"
            low = data.get(f"{bounds}/ci_low", value)
            high = data.get(f"{bounds}/ci_high", value)
            run.accuracy.setdefault(match["source"], []).append((step, value, low, high))


def _style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c9ced6")
    axes.tick_params(colors=MUTED, labelsize=8.5, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _label(axes: Any, title: str, unit: str, steps: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=16)
    axes.text(0, 1.02, unit, transform=axes.transAxes, fontsize=8.5, color=MUTED, va="bottom")
    axes.set_xlabel(steps, fontsize=9, color=MUTED)


def _trend(axes: Any, points: Points, color: str, label: str) -> None:
    """Draw the values in a faint color, and their moving mean."""
    steps, values = zip(*points, strict=True)
    window = len(values) // 12 | 1
    if window == 1:
        marker = "o" if len(values) < 25 else ""
        axes.plot(steps, values, color=color, linewidth=1.8, marker=marker, markersize=3.5)
        return
    axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.3, label=label)
    axes.plot(
        steps, smooth(values, window), color=color, linewidth=2.0, label=f"mean of {window} steps"
    )
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="best")


def _draw_reward(axes: Any, run: _PlottedRun) -> None:
    _label(axes, "Reward", "mean score of the step's samples", "RL step")
    _trend(axes, run.reward, _BLUE, "each step")


def _draw_sft(axes: Any, run: _PlottedRun) -> None:
    _label(axes, "Supervised fine-tuning", "loss, nats per target token", "SFT step")
    _trend(axes, run.sft_loss, _GREEN, "each step")


def _draw_accuracy(axes: Any, run: _PlottedRun) -> None:
    steps = "RL step" if run.reward else "step"
    several = len(run.accuracy) > 1
    bars = any(low < high for points in run.accuracy.values() for _, _, low, high in points)
    unit = "share of right answers" + (", bars: 95 % interval" if bars else "")
    _label(axes, "Held-out accuracy", unit, steps)
    for color, (source, points) in zip(_cycle(run.accuracy), run.accuracy.items(), strict=True):
        x, y, low, high = zip(*points, strict=True)
        below = [a - b for a, b in zip(y, low, strict=True)]
        above = [b - a for a, b in zip(y, high, strict=True)]
        axes.errorbar(
            x, y, yerr=(below, above), color=color, linewidth=1.8, marker="o", markersize=5,
            elinewidth=1.2, capsize=3, label=source,
        )  # fmt: skip
        # Place labels off the line: below a rising start, to the right of the end.
        rises = len(y) > 1 and y[1] > y[0]
        for i, offset in {0: (8, -11 if rises else 6), len(x) - 1: (8, -3)}.items():
            axes.annotate(
                f"{100 * y[i]:.1f} %", (x[i], y[i]), xytext=offset, textcoords="offset points",
                fontsize=9, color=color, fontweight="bold",
            )  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.margins(x=0.16, y=0.12)
    if several:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="best")


def _draw_lengths(axes: Any, run: _PlottedRun) -> None:
    _label(axes, "Response length", "tokens", "RL step")
    _draw_lines(axes, run.lengths, _LENGTHS)
    axes.set_ylim(bottom=0)
    axes.legend(
        fontsize=8.5, frameon=False, labelcolor=INK, ncols=3, loc="lower right",
        bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0,
    )  # fmt: skip


def _draw_drafts(axes: Any, run: _PlottedRun) -> None:
    _label(axes, "Drafts", "tokens per verification", "RL step")
    _draw_lines(axes, run.drafts, _DRAFTS)
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="lower right")


def _draw_lines(
    axes: Any, lines: Mapping[str, Points], names: Mapping[str, tuple[str, str]]
) -> None:
    for name, points in lines.items():
        steps, values = zip(*points, strict=True)
        # Markers show at which steps a value that is not logged every step was measured.
        marker = "o" if max(np.diff(steps), default=1) > 1 else None
        axes.plot(
            steps, values, color=names[name][1], linewidth=1.4, label=name, marker=marker,
            markersize=3.5,
        )  # fmt: skip


def _cycle(items: Mapping[str, object]) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(len(items))]


def _fact(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
