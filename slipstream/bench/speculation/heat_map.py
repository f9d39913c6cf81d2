"""The picture of a grid of draft plans: how much faster than plain decoding, by batch size.

Draws rows of `grid.run_grid`. Called by `slipstream bench speculation --plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.bench.record import ResultRow, median_of
from slipstream.bench.speculation.grid import OVER_OFF, OVER_PLAIN, SELECTOR, over_of
from slipstream.bench.speculation.rollout import PLAIN
from slipstream.errors import DataError
from slipstream.metrics.picture import INK, MUTED

SLOWER = {OVER_PLAIN: "plain decoding", OVER_OFF: "without drafts"}

_FASTEST = 2.0
"""Speed-up, and its inverse, from which on colours no longer change, where none is larger."""


def plot_grid(rows: Sequence[ResultRow], out: Path) -> Path:
    """Draw the PNG `out`, making its folder, and return its path.

    A cell is a plan at a batch size: decode steps of it against plain decoding. The fastest plan of
    each batch size is framed. Raises DataError for rows that are not of a grid.
    """
    over = over_of(rows)
    cells = {
        (row.case, row.contender): median_of(row.values[over])
        for row in rows
        if row.contender not in (PLAIN, SELECTOR) and over in row.values
    }
    if not cells:
        raise DataError("nothing to draw: no row holds a draft plan against plain decoding")
    cases, plans = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    speeds = np.array([[cells.get((case, plan), np.nan) for plan in plans] for case in cases])
    # Imported here: benches run without drawing, too.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    most = max(_FASTEST, float(np.nanmax(speeds)), 1 / float(np.nanmin(speeds)))
    figure = Figure(
        figsize=(1.6 + 0.8 * len(plans), 1.7 + 0.45 * len(cases)), dpi=150, facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # A plan that takes twice the time is as far from plain decoding as one that takes half.
    axes.imshow(speeds, cmap="RdBu", norm=LogNorm(1 / most, most), aspect="auto")
    for i, j in np.ndindex(*speeds.shape):
        if np.isnan(speeds[i, j]):
            continue
        best = speeds[i, j] == np.nanmax(speeds[i])
        dark = abs(np.log(speeds[i, j])) > 0.6 * np.log(most)
        axes.text(
            j, i, f"{speeds[i, j]:.2f}", ha="center", va="center", fontsize=9,
            color="white" if dark else INK, fontweight="bold" if best else "normal",
        )  # fmt: skip
        if best:
            frame = Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, fill=False, edgecolor=INK, lw=1.4)
            axes.add_patch(frame)
    axes.set_xticks(range(len(plans)), plans)
    axes.set_yticks(range(len(cases)), cases)
    axes.tick_params(length=0, labelsize=9, colors=MUTED)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("draft plan: steps_topk_tokens to verify", fontsize=9, color=MUTED)
    axes.set_title(
        f"Decode steps, times as fast as {SLOWER[over]}", loc="left", fontsize=11,
        fontweight="bold", color=INK,
    )  # fmt: skip
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", metadata={"Software": None})
    return out
