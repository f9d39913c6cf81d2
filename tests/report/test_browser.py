"""The report in a real browser: offline, light and dark, wide and narrow."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import pytest

from slipstream.report.ledger import PARTS
from slipstream.report.page import write_report
from tests.report.conftest import Show
from tests.report.run_folders import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("report")
    write_report([make_run(root / "run")], root / "report.html")
    return (root / "report.html").as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_is_drawn_without_errors_or_network(
    show: Show, report: str, width: int, scheme: str
) -> None:
    with show(report, width=width, scheme=scheme) as shown:
        page = shown.page
        assert (shown.messages, shown.requests) == ([], [report])
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        # Nothing exceeds the width of the window.
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("#chart-reward canvas").count() == 1
        columns = style(page, ".grid", "gridTemplateColumns").split()
        assert len(columns) == (2 if width > 860 else 1)
        # The text is lighter than the background only in the dark scheme.
        ink, paper = (style(page, "body", name) for name in ("color", "backgroundColor"))
        assert (int(ink[4:].split(",")[0]) > int(paper[4:].split(",")[0])) == (scheme == "dark")


def style(page: Page, selector: str, name: str) -> str:
    return str(page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}"))


def test_the_page_shows_the_times_and_tiles_of_the_run(show: Show, report: str) -> None:
    with show(report) as shown:
        text = shown.page.inner_text("main")
        assert "Where the time went: 30.0 s of wall time" in text
        assert "Zero in all steps" in text
        assert shown.page.inner_text("#zero-differing").split("\t")[0] == "Log-probs that differ"
        assert "draft\t1.0 s\t3.3 %" in text
        head = shown.page.inner_text("#top")
        assert "finished" in head
        assert "40.0 → 60.0 %" in head


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_part_of_the_time_has_its_own_color(show: Show, report: str, scheme: str) -> None:
    with show(report, scheme=scheme) as shown:
        colours = shown.page.evaluate("D.parts.map(partColor)")
        assert len(set(colours)) == len(colours) == len(PARTS)
        # The color is the same in the bar of the wall time and in the timeline.
        for part in ("validation", "checkpoints"):
            drawn = shown.page.locator(f'.bar span[title^="{part}: "]').evaluate_all(
                "found => found.map((one) => one.style.background)"
            )
            assert len(drawn) >= 2
            assert len(set(drawn)) == 1


def test_drafted_tokens_are_highlighted_and_show_their_log_prob(show: Show, report: str) -> None:
    with show(report) as shown:
        sample = shown.page.locator(".sample").first
        assert sample.locator(".text span").all_inner_texts() == ["1", " +", " <b>"]
        assert sample.locator(".text span.d").all_inner_texts() == [" +"]
        assert sample.locator(".text span.m").all_inner_texts() == [" <b>"]
        sample.locator(".text span.d").click()
        assert sample.locator(".picked").inner_text() == (
            'token 2: " +", log-prob -0.0101 (probability 99 %), drafted and accepted'
        )


def test_lines_can_be_hidden_and_the_axis_changed(show: Show, report: str) -> None:
    with show(report) as shown:
        page = shown.page
        key = page.locator("#chart-lengths .legend button").first
        assert key.get_attribute("aria-pressed") == "true"
        key.click()
        assert page.locator("#chart-lengths .legend button.off").count() == 1
        page.get_by_label("over").select_option("minutes")
        assert page.locator("#chart-lengths .u-axis").count() == 2
        # A hidden line stays hidden after the page is redrawn.
        assert page.locator("#chart-lengths .legend button.off").count() == 1
        page.get_by_label("light or dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.locator("#chart-lengths .legend button.off").count() == 1
        assert shown.messages == []


def test_smoothed_returns_moving_mean_and_interval(show: Show, report: str) -> None:
    values: list[float | None] = [1e6 + 1, 1e6 + 2, None, 1e6 + 6, 1e6 + 6, 1e6 + 6]
    with show(report) as shown:
        found = shown.page.evaluate("y => smoothed(y, 3)", values)
    window = [[0, 1], [0, 1], [1, 3], [3, 4], [3, 4, 5], [4, 5]]
    for place, inside in enumerate(window):
        known = [value for i in inside if (value := values[i]) is not None]
        half = 1.96 * stdev(known) / len(known) ** 0.5
        assert found["mean"][place] == pytest.approx(mean(known), abs=1e-6)
        assert found["low"][place] == pytest.approx(mean(known) - half, abs=1e-6)
        assert found["high"][place] == pytest.approx(mean(known) + half, abs=1e-6)


def test_several_runs_share_charts(show: Show, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("plain", "drafted")]
    write_report(runs, tmp_path / "both.html")
    with show((tmp_path / "both.html").as_uri()) as shown:
        keys = shown.page.locator("#chart-reward .legend button").all_inner_texts()
        assert keys == ["plain\n0.5", "drafted\n0.5"]
        assert shown.messages == []
