"""The documentation site builds without warnings, and all of its links have targets."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import DOCS, ROOT, markdown

pytest.importorskip("sphinx", reason="pip install 'slipstream-rl[docs]'")
pytest.importorskip("myst_parser", reason="pip install 'slipstream-rl[docs]'")
pytest.importorskip("furo", reason="pip install 'slipstream-rl[docs]'")


class Links(HTMLParser):
    """The link targets, images and anchors of a page of the site."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag in ("a", "img", "script", "link"):
                self.targets.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # As in `make docs`, in another process: imports in this one cause warnings.
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q",
         "-d", str(out / "doctrees"), str(DOCS), str(out / "html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return out / "html"


def test_contents_list_every_page(site: Path) -> None:
    built = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    written = {
        path.relative_to(DOCS).with_suffix("").as_posix()
        for path in markdown()
        if path.is_relative_to(DOCS)
    }
    assert written <= built
    start = Links(site / "index.html")
    listed = {unquote(urlsplit(target).path).removesuffix(".html") for target in start.targets}
    assert written - listed == {"index", "algorithms"}


def test_links_of_the_site_have_targets(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    broken, followed = [], 0
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            followed += 1
            known = pages[there].anchors if there in pages else set[str]()
            if not there.is_file() or (parts.fragment and unquote(parts.fragment) not in known):
                broken.append(f"{page.name}: {target}")
    assert broken == []
    assert followed > 1000


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"(https?:[^\"]*)", text)
        assert loaded == [], page.name


def test_formulas_are_mathml_without_scripts(site: Path) -> None:
    text = (site / "algorithms/advantages/grpo.html").read_text(encoding="utf-8")
    assert text.count("<math") >= 2
    assert not re.search(r"<script[^>]*mathjax", text, re.IGNORECASE)


@pytest.mark.parametrize("page", markdown(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_markdown_files_have_targets(page: Path) -> None:
    """Links are resolved as on GitHub: relative to the file, with its anchors for headings."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(text)):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        assert there.exists(), target
        if parts.fragment:
            assert parts.fragment in anchors(there.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _without_code(text, spans=False), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def _without_code(text: str, *, spans: bool = True) -> str:
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text) if spans else text
