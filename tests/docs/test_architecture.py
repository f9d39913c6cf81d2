"""What the pages say of the tree and of the report is what there is."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS, ROOT


def test_ranks_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (ranks,) = [c for c in contracts["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    held = [set(layer.split(" | ")) for layer in ranks["layers"]]
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(held), 0, -1))
    assert [set(re.findall(r"`(\w+)`", names)) for _, names in rows] == held


def test_sections_of_the_report_are_those_it_draws() -> None:
    script = (ROOT / "slipstream/report/assets/page.js").read_text(encoding="utf-8")
    drawn = script.split("const SECTIONS = [")[1].split("];")[0]
    page = (DOCS / "report.md").read_text(encoding="utf-8").split("| section |")[1]
    assert re.findall(r"^\| ([A-Z][^|]*) \|", page, re.MULTILINE) == re.findall(
        r'\["\w+", "([^"]+)"\]', drawn
    )
