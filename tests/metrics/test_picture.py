"""The plot of a run shows the numbers of its metrics files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import DataError
from slipstream.metrics.loggers import JSONLLogger
from slipstream.metrics.picture import plot_run, smooth


def write(path: Path, *lines: tuple[int, dict[str, float]]) -> Path:
    logger = JSONLLogger(path)
    for step, data in lines:
        logger.log(step, data)
    logger.close()
    return path


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects every figure that is saved."""
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_each_panel_shows_its_data(tmp_path: Path, figures: list[Any]) -> None:
    sft = write(
        tmp_path / "sft.jsonl",
        (1, {"sft/loss": 2.0}),
        (2, {"sft/loss": 1.0, "val-core/c/acc/mean@1": 0.9}),
    )
    bounds = {"val-aux/c/acc/mean@1/ci_low": 0.1, "val-aux/c/acc/mean@1/ci_high": 0.4}
    lengths = {"response_length/median": 5, "response_length/p90": 8, "response_length/max": 9}
    rl = write(
        tmp_path / "metrics.jsonl",
        (0, {"val-core/c/acc/mean@1": 0.2, **bounds}),
        (1, {"critic/score/mean": 0.3, **lengths}),
        (2, {"critic/score/mean": 0.4, "val-core/c/acc/mean@1": 0.5, **lengths}),
    )
    out = plot_run([sft, rl], tmp_path / "out" / "run.png", {"accuracy": 0.51239, "steps": 2})
    assert out.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert titles(figure) == [
        "Reward", "Held-out accuracy", "Response length", "Supervised fine-tuning",
    ]  # fmt: skip
    reward, accuracy, length, loss = figure.axes
    assert reward.lines[0].get_xydata().tolist() == [[1, 0.3], [2, 0.4]]
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 0.2], [2, 0.5]]
    (bars,) = accuracy.containers
    (segments,) = bars[2]
    assert [s.round(6).tolist() for s in segments.get_segments()] == [
        [[0, 0.1], [0, 0.4]],
        [[2, 0.5], [2, 0.5]],
    ]
    assert [text.get_text() for text in accuracy.texts if "%" in text.get_text()[-1]] == [
        "20.0 %", "50.0 %",
    ]  # fmt: skip
    assert [line.get_ydata().tolist() for line in length.lines] == [[5, 5], [8, 8], [9, 9]]
    assert loss.lines[0].get_ydata().tolist() == [2.0, 1.0]
    assert "accuracy: 0.5124   ·   steps: 2" in [text.get_text() for text in figure.texts]
    assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)


def test_pyplot_is_not_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", (1, {"critic/score/mean": 0.5}))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from slipstream.metrics.picture import plot_run\n"
        f"plot_run([Path({str(path)!r})], Path({str(tmp_path / 'run.png')!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.png").exists()


def test_panels_without_data_are_omitted(tmp_path: Path, figures: list[Any]) -> None:
    path = write(
        tmp_path / "sft.jsonl", (1, {"sft/loss": 2.0}), (1, {"val-core/a/b/acc/mean@4": 0.5})
    )
    plot_run(path, tmp_path / "a.png")
    assert titles(figures[0]) == ["Held-out accuracy", "Supervised fine-tuning"]
    path = write(tmp_path / "rl.jsonl", (1, {"critic/score/mean": 2.0}))
    plot_run(path, tmp_path / "b.png")
    assert titles(figures[1]) == ["Reward"]


def test_accepted_lengths_have_a_panel(tmp_path: Path, figures: list[Any]) -> None:
    before, after = "drafter/accept_length/before", "drafter/accept_length/after"
    lines = [
        (step, {"critic/score/mean": 0.1, "spec/accept_length": 2.0 + step / 4})
        for step in (1, 2, 3, 4)
    ]
    lines[1][1].update({before: 2.25, after: 2.5})
    lines[3][1].update({before: 2.5, after: 3.0})
    plot_run(write(tmp_path / "m.jsonl", *lines), tmp_path / "a.png")
    (figure,) = figures
    assert titles(figure) == ["Reward", "Drafts"]
    rollouts, used, trained = figure.axes[1].lines
    assert rollouts.get_ydata().tolist() == [2.25, 2.5, 2.75, 3.0]
    assert used.get_xydata().tolist() == [[2, 2.25], [4, 2.5]]
    assert trained.get_xydata().tolist() == [[2, 2.5], [4, 3.0]]
    assert (rollouts.get_marker(), used.get_marker()) == ("None", "o")


def test_the_last_of_three_panels_spans_the_row(tmp_path: Path, figures: list[Any]) -> None:
    sft = write(tmp_path / "sft.jsonl", (1, {"sft/loss": 2.0}))
    rl = write(tmp_path / "m.jsonl", (1, {"critic/score/mean": 0.1, "response_length/max": 5.0}))
    plot_run([sft, rl], tmp_path / "a.png")
    widths = [axes.get_position().width for axes in figures[0].axes]
    assert widths[0] == pytest.approx(widths[1])
    assert widths[2] > 2 * widths[0]


def test_long_series_have_a_moving_mean(tmp_path: Path, figures: list[Any]) -> None:
    lines = [(i, {"critic/score/mean": float(i % 2)}) for i in range(48)]
    plot_run(write(tmp_path / "m.jsonl", *lines), tmp_path / "a.png")
    raw, smoothed = figures[0].axes[0].lines
    assert raw.get_ydata().tolist() == [float(i % 2) for i in range(48)]
    assert smoothed.get_label() == "mean of 5 steps"
    assert smoothed.get_ydata()[10] == 0.4


def test_smooth_is_a_centered_moving_mean() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 3) == [1.5, 3.0, 11 / 3, 4.5]
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]
    assert smooth([], 3) == []


def test_plot_run_raises_without_data(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", (1, {"actor/lr": 1.0}))
    with pytest.raises(DataError, match=r"nothing to draw in .*m\.jsonl"):
        plot_run(path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
