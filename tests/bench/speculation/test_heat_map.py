"""The picture of a grid: which cells it has, and which are framed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.speculation.grid import SELECTOR
from slipstream.bench.speculation.heat_map import plot_grid
from slipstream.bench.speculation.rollout import PLAIN
from slipstream.errors import DataError


def row(case: str, contender: str, over_plain: float | Spread) -> ResultRow:
    return ResultRow(
        benchmark="speculation",
        case=case,
        contender=contender,
        dtype="float32",
        threads=1,
        seconds=Spread.of([1.0]),
        machine=this_machine(),
        values={"over_plain": over_plain},
    )


def test_a_cell_for_each_plan_and_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: Any, **more: Any) -> None:
        drawn.append(self)
        save(self, *arguments, **more)

    monkeypatch.setattr(Figure, "savefig", keep)
    rows = [
        row("batch 1", PLAIN, 1.0),
        row("batch 1", "off", 0.98),
        row("batch 1", "3_1_4", Spread.of([1.9, 2.1, 2.6])),
        row("batch 1", SELECTOR, 2.0),
        row("batch 32", "off", 1.01),
        row("batch 32", "3_1_4", 0.8),
        row("batch 32", SELECTOR, 1.0),
    ]
    out = plot_grid(rows, tmp_path / "pictures" / "grid.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["0.98", "2.10", "1.01", "0.80"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["off", "3_1_4"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["batch 1", "batch 32"]
    # The fastest of each batch size.
    frames = [(round(p.get_x() + 0.48), round(p.get_y() + 0.46)) for p in axes.patches]
    assert frames == [(1, 0), (0, 1)]
    (image,) = axes.images
    assert image.norm.vmin * image.norm.vmax == pytest.approx(1)
    assert image.norm.vmax == pytest.approx(2.1)


def test_rows_of_something_else_are_no_grid(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to draw"):
        plot_grid([row("batch 1", PLAIN, 1.0)], tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()
