"""Sphinx's settings: the Markdown files of this folder as a site, built offline (`make docs`).

The files stay readable as plain Markdown. Anchors of headings are GitHub's, and formulas become
MathML while the site is built, so that its pages ask nobody for scripts or fonts.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "Slipstream"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "Slipstream"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"

HERE = Path(__file__).parent

MOVED = ("algorithms",)
"""Pages that only say where their contents went: reached by old links, listed nowhere."""


def _before_reading(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files of the repository outside this folder give the file itself."""
    folder = (HERE / page).parent

    def outside(match: re.Match[str]) -> str:
        inside = (folder / match[1]).resolve().is_relative_to(HERE)
        return match[0] if inside else f"](path:{match[1]})"

    source[0] = re.sub(r"\]\((\.\./[^)#]+)(#[^)]*)?\)", outside, source[0])


def _formula(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _formula_block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def _leave_out_of_contents(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname in MOVED:
        app.env.metadata[app.env.docname]["orphan"] = "true"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_formula, None), (_formula_block, None))
    app.connect("source-read", _before_reading)
    app.connect("doctree-read", _leave_out_of_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
