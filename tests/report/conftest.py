"""A real browser to open pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@dataclass(slots=True)
class Shown:
    """An open page, its console messages and errors, and its network requests."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Show = Callable[..., AbstractContextManager[Shown]]


# Module scope: its event loop blocks other event loops in this thread while it exists.
@pytest.fixture(scope="module")
def show() -> Iterator[Show]:
    """A function: `with show(url, width=..., scheme=...) as shown` opens and draws a page."""
    if PROGRAM is None:
        pytest.skip("no Chromium here; sudo apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox needs privileges that a container lacks; the pages are trusted.
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])

        @contextmanager
        def shown(url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Shown]:
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page = context.new_page()
            result = Shown(page)
            page.on("console", lambda message: result.messages.append(message.text))
            page.on("pageerror", lambda error: result.messages.append(str(error)))
            page.on("request", lambda request: result.requests.append(request.url))
            page.goto(url)
            page.wait_for_selector("html[data-ready]", timeout=20_000)
            try:
                yield result
            finally:
                context.close()

        try:
            yield shown
        finally:
            browser.close()
