"""Makes the screenshots of README.md and docs: the report in a browser, and the terminal of a run.

    python bench/screenshots.py report runs/quickstart docs/report.png
    python bench/screenshots.py terminal docs/terminal.png -- slipstream rl ...

`report` draws the run's page and takes a screenshot of its top in light and in dark colors
(`report-dark.png`). `terminal` runs a command in a terminal of 100 columns, and takes a screenshot
of the moment when most of the shown sample came from drafts. Needs Chromium, playwright and pyte.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from slipstream.report.page import write_report

COLUMNS, ROWS = 100, 30
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
_COLORS = {
    "black": "#3b4252", "red": "#e06c75", "green": "#7ec58a", "brown": "#d9b06b",
    "blue": "#6fa8f5", "magenta": "#c58af0", "cyan": "#61c1d0", "white": "#dfe3ea",
    "default": "#dfe3ea", "brightblack": "#7d8794", "brightgreen": "#9be3a8",
}  # fmt: skip


def report(run: Path, output: Path) -> None:
    """Take screenshots of the top of the report of `run`."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_report([run], page)
        for scheme, path in (
            ("light", output),
            ("dark", output.with_stem(f"{output.stem}-dark")),
        ):
            _screenshot(page.as_uri(), path, width=1200, height=1500, scheme=scheme, ready=True)


def terminal(command: Sequence[str], output: Path) -> None:
    """Run `command` in a terminal, and take a screenshot of its best moment."""
    screens = _run(command)
    # The engine is running, and most of the sample's tokens are underlined as drafted.
    best = max(
        screens,
        key=lambda screen: (" running" in screen, screen.count("text-decoration:underline")),
    )
    text = (
        "<!doctype html><meta charset=utf-8><style>body{margin:0;background:#1b1f27;color:#dfe3ea}"
        "pre{margin:0;padding:18px 22px;font:14px/1.35 'DejaVu Sans Mono',monospace;"
        f"width:max-content}}</style><pre>{best}</pre>"
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(text, encoding="utf-8")
        _screenshot(page.as_uri(), output, width=920, height=300, scheme="dark", ready=False)


def _run(command: Sequence[str]) -> list[str]:
    """The contents of the terminal after each burst of output, as HTML."""
    import pyte

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "CI": ""}
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, close_fds=True
    )
    os.close(child)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    screens: list[str] = []
    while True:
        ready, _, _ = select.select([parent], [], [], 0.2)
        try:
            data = os.read(parent, 65536) if ready else b""
        except OSError:
            break
        if ready and not data:
            break
        stream.feed(data)
        if not ready or len(screens) == 0:
            screens.append(_as_html(screen))
        if process.poll() is not None and not ready:
            break
    os.close(parent)
    if process.wait():
        raise SystemExit(f"the command ended with status {process.returncode}")
    return [text for text in screens if text.strip()] or [""]


def _as_html(screen: object) -> str:
    lines = []
    for row in range(ROWS):
        line = screen.buffer[row]  # type: ignore[attr-defined]
        cells = [line[column] for column in range(COLUMNS)]
        text = "".join(_cell(cell) for cell in cells).rstrip()
        lines.append(text)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)


def _cell(cell: object) -> str:
    data, color = cell.data, cell.fg  # type: ignore[attr-defined]
    style = ""
    if color != "default":
        style += f"color:{_COLORS.get(color, '#' + color if len(color) == 6 else '#dfe3ea')};"
    if cell.bold:  # type: ignore[attr-defined]
        style += "font-weight:bold;"
    if cell.underscore:  # type: ignore[attr-defined]
        style += "text-decoration:underline;"
    shown = html.escape(data)
    return f'<span style="{style}">{shown}</span>' if style else shown


def _screenshot(
    url: str, output: Path, *, width: int, height: int, scheme: str, ready: bool
) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.goto(url)
        if ready:
            page.wait_for_selector("html[data-ready]")
            page.screenshot(path=str(output))
        else:
            page.locator("pre").screenshot(path=str(output))
        browser.close()
    print(output)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_report = kinds.add_parser("report")
    of_report.add_argument("run", type=Path)
    of_report.add_argument("output", type=Path)
    of_terminal = kinds.add_parser("terminal")
    of_terminal.add_argument("output", type=Path)
    of_terminal.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.kind == "report":
        report(args.run, args.output)
    else:
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        terminal(command, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
