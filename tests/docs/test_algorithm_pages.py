"""Every built-in algorithm has a page, and its keys, defaults and metrics are correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.algorithms import (
    adv_estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    policy_loss_names,
)
from slipstream.algorithms.registry import AdvantageFn, PolicyLossFn
from slipstream.config.tree import options, show
from slipstream.metrics.names import SECTIONS, check_names
from tests.docs.pages import DOCS

FOLDER = DOCS / "algorithms"
PAGES = sorted([*FOLDER.glob("advantages/*.md"), *FOLDER.glob("losses/*.md")])
PARTS = ["Formula", "When to use it", "Keys", "Metrics to watch", "Command"]


def shipped(names: tuple[str, ...], module: str) -> list[str]:
    """Names of built-in functions, without those that other tests have registered."""
    lookup = get_adv_estimator_fn if module == "advantages" else get_policy_loss_fn
    functions: dict[str, AdvantageFn | PolicyLossFn] = {name: lookup(name) for name in names}
    return [n for n, f in functions.items() if f.__module__.startswith("slipstream.algorithms.")]


def test_every_algorithm_has_a_page() -> None:
    for kind, names in (("advantages", adv_estimator_names()), ("losses", policy_loss_names())):
        pages = {
            path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob(f"{kind}/*.md")
        }
        lookup = get_adv_estimator_fn if kind == "advantages" else get_policy_loss_fn
        assert pages.keys() <= set(names)
        for name in shipped(names, kind):
            (own,) = [page for page in pages if lookup(page) is lookup(name)]
            line = next(line for line in pages[own].splitlines() if line.startswith("Name: "))
            assert f"`{name}`" in line or f"={name}`" in line, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_page_has_all_sections_with_correct_keys_and_metrics(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# `{page.stem}`\n")
    assert [h for h in re.findall(r"^## (.+)$", text, re.MULTILINE) if h != "Curve"] == PARTS
    assert text.count("\n$$\n") >= 2
    assert re.search(r"^Source: ", text, re.MULTILINE)
    keys = text.split("## Keys")[1].split("## Metrics")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", keys, re.MULTILINE)
    assert len(rows) >= 2
    for key, default in rows:
        assert default == show(options()[key].default), key
    metrics = text.split("## Metrics to watch")[1].split("## Command")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", metrics, re.MULTILINE)
    table = {metric.name for section in SECTIONS for metric in section.metrics}
    templates = [name for name in listed if "<" in name]
    assert all(any(_same(name, row) for row in table) for name in templates)
    check_names(dict.fromkeys((name for name in listed if "<" not in name), 0.0))
    assert page.stem in text.split("## Command")[1]


def _same(name: str, row: str) -> bool:
    """Whether a name with placeholders matches a row of the table, which may list alternatives."""
    pattern = re.sub(r"\\\{([^}]*)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", re.escape(row))
    return re.fullmatch(pattern, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_overview_links_to_the_page(page: Path) -> None:
    overview = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert f"({page.parent.name}/{page.name})" in overview
