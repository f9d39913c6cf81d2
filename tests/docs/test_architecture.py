"""The pages on the architecture, the glossary and the report match the code."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT

CONTRACTS: dict[str, dict[str, Any]] = {
    contract["name"].split(":")[0]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
}
RANKS = [set(layer.split(" | ")) for layer in CONTRACTS["Ranks"]["layers"]]


def below(folder: str) -> set[str]:
    """Folders and modules with a lower rank than `folder`, as dotted names."""
    (rank,) = [number for number, names in enumerate(RANKS) if folder in names]
    return {f"slipstream.{name}" for names in RANKS[rank + 1 :] for name in names}


def test_table_of_ranks_equals_the_import_contract() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(RANKS), 0, -1))
    assert [set(re.findall(r"`(\w+)`", names)) for _, names in rows] == RANKS


def test_contract_on_the_configuration_covers_every_folder_below_build() -> None:
    contract = CONTRACTS["Below the wiring, a folder gets values and not the configuration"]
    without_config = below("config") | {"slipstream.config"}
    assert set(contract["source_modules"]) == below("build") - without_config


@pytest.mark.parametrize(
    ("name", "folder", "allowed"),
    [
        ("Algorithms import nothing else of Slipstream", "algorithms", set()),
        ("Sampling imports only kernels", "sampling", {"slipstream.kernels"}),
    ],
)
def test_contract_forbids_every_other_folder_of_lower_rank(
    name: str, folder: str, allowed: set[str]
) -> None:
    assert set(CONTRACTS[name]["forbidden_modules"]) == below(folder) - allowed


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_files_and_folders_named_on_a_page_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    # A path ends in a slash or a known suffix; names with placeholders or wildcards are patterns.
    paths = set(re.findall(r"`([\w./]+(?:/|\.py|\.md|\.toml))`", text))
    assert len(paths) > 20
    missing = [
        path
        for path in sorted(paths)
        if not ((ROOT / "slipstream" / path).exists() or (ROOT / path).exists())
    ]
    assert not missing


def test_names_that_the_architecture_page_places_in_a_file_are_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    placed = re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", text)
    assert len(placed) > 10
    missing = []
    for name, path in placed:
        own, shared = ROOT / "slipstream" / path, ROOT / path
        source = (own if own.exists() else shared).read_text(encoding="utf-8")
        if not re.search(rf"\b{name}\b", source):
            missing.append((name, path))
    assert not missing


def test_sections_of_the_report_page_equal_those_of_the_report() -> None:
    script = (ROOT / "slipstream/report/assets/page.js").read_text(encoding="utf-8")
    drawn = script.split("const SECTIONS = [")[1].split("];")[0]
    page = (DOCS / "report.md").read_text(encoding="utf-8").split("| section |")[1]
    assert re.findall(r"^\| ([A-Z][^|]*) \|", page, re.MULTILINE) == re.findall(
        r'\["\w+", "([^"]+)"\]', drawn
    )
