"""Documentation from the schema: `describe` one key, or render docs/config.md.

Reads the string under each field from the schema's source, so that a description has one home.
Called by `slipstream config` and, as `python -m slipstream.config.docs docs/config.md`, by whoever
changes an option; a test compares the file with what this module renders.
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

Every option, with its type and default. Set one on the command line (`slipstream train key=value`)
or in a YAML file (`--config FILE`). Where several are set, the command line wins over the file or
recipe, and that wins over the default. `slipstream config KEY` prints one entry of this page.

Lists are written `[a,b]`, an absent value `null`. Free-form mappings take new keys:
`+reward_model.reward_kwargs.key=value`, and lose them: `~reward_model.reward_kwargs.key`.

This page is generated: `python -m slipstream.config.docs docs/config.md`.
"""


@functools.cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field, from a module's source."""
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
    """The documentation of one key; empty where the schema has none (a test forbids that)."""
    return _field_docs(option.owner.__module__).get((option.owner.__name__, option.name), "")


def describe(path: str) -> str:
    """Type, default, meaning and an example of the key `path`, or the keys of a section.

    Raises:
        ConfigError: there is no such key; the message names the nearest ones.
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
    """The whole of docs/config.md: one table per section."""
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
    parser = argparse.ArgumentParser(description="Write the page of all options.")
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(render_markdown(), encoding="utf-8")
