"""A real browser for pages."""

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
    """A page, what its scripts complained of, and what it asked the network for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Show = Callable[..., AbstractContextManager[Shown]]


# Not for the session: while it is there, an event loop runs in this thread, and no other can.
@pytest.fixture(scope="module")
def show() -> Iterator[Show]:
    """`with show(url, width=..., scheme=...) as shown`: the page when it has been drawn."""
    if PROGRAM is None:
        pytest.skip("no Chromium here; sudo apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Its own sandbox wants more than a container has; the pages are ours.
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])

        @contextmanager
        def shown(url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Shown]:
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page = context.new_page()
            result = Shown(page)
            page.on("console", lambda message: result.complaints.append(message.text))
            page.on("pageerror", lambda error: result.complaints.append(str(error)))
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
