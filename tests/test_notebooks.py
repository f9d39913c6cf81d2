"""The notebooks in examples/ run from top to bottom."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))

nbformat = pytest.importorskip("nbformat", reason="pip install 'slipstream-rl[notebook]'")
nbclient = pytest.importorskip("nbclient", reason="pip install 'slipstream-rl[notebook]'")
pytest.importorskip("ipykernel", reason="pip install 'slipstream-rl[notebook]'")


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_quickstart_notebook_learns_and_shows_drafted_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "examples/notebooks/quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    text = "".join(output.get("text", "") for output in outputs_of(notebook))
    first, last = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", text)[0]
    assert float(last) < float(first) / 2
    first, last = re.findall(r"reward ([\d.]+) at first, ([\d.]+) at last", text)[0]
    assert float(last) > float(first) + 0.1
    assert "log-probs that differ between rollout and trainer: 0\n" in text
    assert float(re.findall(r"tokens per verification: ([\d.]+)", text)[0]) > 1.2
    shown = [output.get("data", {}) for output in outputs_of(notebook)]
    assert any("image/png" in data for data in shown)
    assert any("#bfe3c8" in data.get("text/html", "") for data in shown)
