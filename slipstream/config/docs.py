"""Documentation from the schema: describe one key, or render docs/config.md.

The module reads the string under each field from the schema's source, so each description exists
only once. `slipstream config` calls it. After you change an option, run `python -m
slipstream.config.docs docs/config.md`; a test compares that file with the rendered page.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import sys
from pathlib import Path

from slipstream.config.suggest import unknown_key
from slipstream.config.tree import Option, example, options, show, type_text
from slipstream.errors import ConfigError

_INTRODUCTION = """\
# Options

On this page you can look up every option, with its type, default and meaning. `slipstream config
KEY` prints one entry. The [glossary](glossary.md) explains terms.

Set an option on the command line (`slipstream train key=value`) or in a YAML file (`--config
FILE`). The command line overrides the file or recipe, which overrides the default.

Write a list as `[a,b]` and an absent value as `null`. You can add keys to free-form mappings
(`+reward_model.reward_kwargs.key=value`) and remove them (`~reward_model.reward_kwargs.key`).

This page is generated: `python -m slipstream.config.docs docs/config.md`.
"""


@functools.cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """Map (class, field) to the string literal under the field in a module's source."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, literal in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(literal, ast.Expr)
                and isinstance(literal.value, ast.Constant)
            ):
                found[node.name, field.target.id] = inspect.cleandoc(str(literal.value.value))
    return found


def field_doc(option: Option) -> str:
    """Return the documentation of one key, or "" if it has none (a test forbids that)."""
    # A section may inherit options from another one.
    texts = (
        _field_docs(section.__module__).get((section.__name__, option.name), "")
        for section in option.owner.__mro__
        if section is not object
    )
    return next(filter(None, texts), "")


def describe(path: str) -> str:
    """Return type, default, meaning and an example of the key `path`, or the keys of a section.

    Raises ConfigError if the key does not exist. The message names the most similar keys.
    """
    option = options().get(path)
    if option is None:
        raise ConfigError(unknown_key(path))
    if option.section is None:
        return (
            f"{path}\n  {field_doc(option)}\n  type: {type_text(option.annotation)}\n"
            f"  default: {show(option.default)}\n  example: {example(option)}"
        )
    lines = [path, f"  {field_doc(option)}"]
    for key, child in options().items():
        if key.startswith(f"{path}.") and child.section is None:
            lines.append(f"  {key} = {show(child.default)}")
    return "\n".join(lines)


def render_markdown() -> str:
    """Return the text of docs/config.md: one table per section."""
    tables: dict[str, list[str]] = {"": []}
    for key, option in options().items():
        section = key.rpartition(".")[0]
        if option.section is not None:
            tables[key] = []
            continue
        cells = [f"`{option.name}`", type_text(option.annotation), f"`{show(option.default)}`"]
        cells.append(field_doc(option).replace("\n", " "))
        tables[section].append("| " + " | ".join(cells) + " |")
    parts = [_INTRODUCTION]
    for section, rows in tables.items():
        if section:
            parts.append(f"## {section}\n\n{field_doc(options()[section])}\n")
        if rows:
            head = "| key | type | default | meaning |\n|---|---|---|---|\n"
            parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the page that lists all options.")
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(render_markdown(), encoding="utf-8")
